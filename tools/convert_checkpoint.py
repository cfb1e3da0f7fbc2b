"""Hugging Face <-> Megatron conversion: the same as `megatron-klear convert`, for people who look in tools/."""

from __future__ import annotations

import sys

from megatron_klear.cli import main

if __name__ == "__main__":
    raise SystemExit(main(["convert", *sys.argv[1:]]))
