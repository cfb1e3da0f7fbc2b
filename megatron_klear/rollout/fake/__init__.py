"""A stand-in for an SGLang server: a process of its own that speaks the same HTTP, with faults on demand.

`python -m megatron_klear.rollout.fake --port P` (see command.py). It follows SGLang 0.5.23, also where that is awkward;
what it leaves out is said where it would be.
"""
