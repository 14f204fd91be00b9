"""The command `bitdial repack`: a progressive file made of a whole one, or the other way round."""

import argparse

from bitdial.artifact import file_parts, repack
from bitdial.cli.places import writing


def run(options: argparse.Namespace) -> None:
    """Write the other file, and print its parts."""
    with writing(options, {"OUT": options.out}):
        repack(options.file, options.out, progressive=not options.whole)
    size = f"{options.out.stat().st_size:,} bytes (before: {options.file.stat().st_size:,})"
    if options.whole:
        print(f"Saved {options.out}: all widths in one, {size}")
        return
    parts = [f"{part.end:,} for {part.bits} bits" for part in file_parts(options.out)]
    print(f"Saved {options.out}: {size}; its first bytes are enough: {', '.join(parts)}")
