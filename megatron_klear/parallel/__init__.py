"""Ranks, groups and devices: the only place that touches them."""

import logging
import warnings

# Megatron warns at import that Apex and Transformer Engine are missing, and of its own deprecations. Neither package is
# required, so to a CPU user this is noise. Silenced here, once: every package that imports Megatron imports this first.
for _pattern in (
    ".*[Aa]pex.*",
    ".*[Tt]ransformer.?[Ee]ngine.*",
    ".*full scope is deprecated.*",
    # Said of every expert under sequence parallelism: an expert is whole on its rank, on purpose.
    "`sequence_parallel` is set to `True`, but tensor model parallel size is 1.*",
    "`torch.distributed.(all_gather_into_tensor|reduce_scatter_tensor)` is deprecated.*",
    "`load_state_dict` is deprecated.*",
    "Please use DTensor instead and we are deprecating ShardedTensor.*",
    "When using .* it is recommended to set the environment variable CUDA_DEVICE_MAX_CONNECTIONS.*",
    "The .grad attribute of a Tensor that is not a leaf.*",
):
    warnings.filterwarnings("ignore", message=_pattern)
logging.getLogger("megatron.core").setLevel(logging.ERROR)
