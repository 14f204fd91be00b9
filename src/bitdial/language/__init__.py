"""How good a language model is: perplexity on a text, and zero-shot questions."""

from bitdial.language.evaluate import evaluate_language
from bitdial.language.questions import read_questions

__all__ = ["evaluate_language", "read_questions"]
