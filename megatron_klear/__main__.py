"""`python -m megatron_klear` is the command `megatron-klear`."""

from __future__ import annotations

import sys

from megatron_klear.cli import main

sys.exit(main())
