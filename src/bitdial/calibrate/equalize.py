def equalize(model, blocks, inputs):
    return 0
