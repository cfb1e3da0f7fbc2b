"""What must hold between the settings of servers and of rollouts on them; see `rules` for how a rule works."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from megatron_klear.config.names import NOT_GIVEN
from megatron_klear.config.recipe import RolloutConfig, SelectionConfig, TrainConfig
from megatron_klear.config.servers import ServersConfig
from megatron_klear.errors import Fault

Faults = Iterator[Fault]


def _servers_are_for_their_engine(rollout: RolloutConfig, servers: ServersConfig | None) -> Faults:
    if rollout.engine == "embedded":
        if servers is not None:
            reason = "would have no effect with rollout.engine embedded, only with sglang or vllm"
            yield Fault("servers", servers.model_dump(exclude_unset=True), reason, "leave it out")
    elif servers is None:
        reason = f"needed with rollout.engine {rollout.engine}: where the servers are, or how many to start"
        yield Fault("servers", NOT_GIVEN, reason, "servers: {urls: [http://host:port]} or {num_servers: 1}")
    else:
        yield from _servers_can_be_found(servers)
        yield from _transport_fits(rollout, servers)


def _servers_can_be_found(servers: ServersConfig) -> Faults:
    if bool(servers.urls) == bool(servers.num_servers):
        reason = "name running servers in servers.urls, or start some with servers.num_servers, one of both"
        yield Fault("servers.urls", list(servers.urls), reason)
    for key, urls in (("urls", servers.urls), ("router_url", (servers.router_url,) if servers.router_url else ())):
        for url in urls:
            if not url.startswith(("http://", "https://")):
                yield Fault(f"servers.{key}", url, "must start with http:// or https://", f"http://{url}")
    if len(set(servers.urls)) < len(servers.urls):
        yield Fault("servers.urls", list(servers.urls), "names a server twice")
    for entry in servers.launch_env:
        if "=" not in entry:
            yield Fault("servers.launch_env", entry, "must be NAME=value")


def _transport_fits(rollout: RolloutConfig, servers: ServersConfig) -> Faults:
    if rollout.engine != "vllm":
        return
    if servers.transport != "disk":
        reason = "vLLM takes weights from disk here; its other ways are not supported yet"
        yield Fault("servers.transport", servers.transport, reason, "disk")
    if servers.pause_mode == "in_place":
        yield Fault("servers.pause_mode", "in_place", "vLLM does not pause so", "abort, retract or wait")


def _ahead_only_with_known_ratios(rollout: RolloutConfig, train: TrainConfig) -> Faults:
    if train.old_logprobs != "current":
        return
    older = {"max_async_steps": rollout.max_async_steps > 0, "partial_rollout": rollout.partial_rollout}
    for name, is_given in older.items():
        if is_given:
            reason = f"takes ratios to be 1, but with rollout.{name} samples come from older weights"
            yield Fault("train.old_logprobs", "current", reason, "recompute or rollout")


def _who_sleeps_cannot_sample(rollout: RolloutConfig, servers: ServersConfig | None) -> Faults:
    if servers is not None and servers.colocate and rollout.max_async_steps > 0:
        reason = "servers that sleep while the trainer trains cannot sample ahead of it"
        yield Fault("servers.colocate", True, f"{reason}: rollout.max_async_steps is {rollout.max_async_steps}")


def _sampling_more_is_more(rollout: RolloutConfig) -> Faults:
    more, needed = rollout.over_sampling_batch_size, rollout.rollout_batch_size
    if more is not None and more < needed:
        reason = f"is less than rollout.rollout_batch_size {needed}"
        yield Fault("rollout.over_sampling_batch_size", more, reason, "more, or leave it out")


def _shuffling_needs_the_whole_step(rollout: RolloutConfig, selection: SelectionConfig) -> Faults:
    if selection.shuffle_rewards and rollout.engine != "embedded":
        reason = f"with rollout.engine {rollout.engine} groups are judged one by one, never a whole step"
        yield Fault("selection.shuffle_rewards", True, reason, "rollout.engine embedded")


SERVER_RULES: tuple[tuple[Callable[..., Faults], tuple[str, ...]], ...] = (
    (_servers_are_for_their_engine, ("rollout", "servers")),
    (_ahead_only_with_known_ratios, ("rollout", "train")),
    (_who_sleeps_cannot_sample, ("rollout", "servers")),
    (_sampling_more_is_more, ("rollout",)),
    (_shuffling_needs_the_whole_step, ("rollout", "selection")),
)
"""Each rule with the sections it needs."""
