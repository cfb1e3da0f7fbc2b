"""The recorder of a run: metrics.jsonl, samples.jsonl, TensorBoard events, wandb; and reading metrics back.

TensorBoard events are written with tensorboard's own protobufs, so that this package needs no torch.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

from tensorboard.compat.proto.event_pb2 import Event, SessionLog  # pyright: ignore[reportAttributeAccessIssue]
from tensorboard.compat.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from megatron_klear.errors import ConfigError, Fault
from megatron_klear.report.jsonl import JsonlWriter, cut_after, read_jsonl, write_error
from megatron_klear.report.samples import SAMPLES_FILE, SampleRecord, sample_row

METRICS_FILE = "metrics.jsonl"
NON_FINITE = ("nan", "inf", "-inf")

logger = logging.getLogger(__name__)


class _Mirror(Protocol):
    """A second place that gets every metric."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class RunRecorder:
    """Writes down a run; a context manager. Made on one rank only.

    `resume_step` is the step of the checkpoint a run goes on from: later lines are cut off, so that no step is there
    twice (-1 cuts everything). Raises `ConfigError` if `output_dir` cannot be written or, without `resume_step`,
    holds another run; `TrainingError` from the log methods if the disk fails later.
    """

    def __init__(
        self,
        output_dir: str | Path,
        *,
        name: str,
        tensorboard: bool,
        wandb_project: str | None = None,
        resume_step: int | None = None,
    ) -> None:
        folder = Path(output_dir)
        with ExitStack() as opened:
            try:
                folder.mkdir(parents=True, exist_ok=True)
                _make_ready(folder, resume_step)
                self._metrics = JsonlWriter(folder / METRICS_FILE)
                opened.callback(self._metrics.close)
                self._samples = JsonlWriter(folder / SAMPLES_FILE)
                opened.callback(self._samples.close)
                self._mirrors: list[_Mirror] = []
                if tensorboard:
                    self._mirrors.append(_TensorBoard(folder / "tensorboard", resume_step))
                    opened.callback(self._mirrors[-1].close)
            except OSError as error:
                raise _cannot_use(folder, error) from error
            if wandb_project is not None:
                self._mirrors.append(_Wandb(folder, name, wandb_project, resume=resume_step is not None))
                opened.callback(self._mirrors[-1].close)
            self._opened = opened.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append one line of metrics and mirror it. A step may be logged more than once (training, then evaluation)."""
        assert not {"step", "time"} & metrics.keys(), "step and time are the recorder's own fields"
        numbers = {key: float(value) for key, value in metrics.items()}
        self._metrics.append([{"step": step, "time": time.time(), **numbers}])
        for mirror in self._mirrors:
            mirror.log(step, numbers)

    def log_samples(self, step: int, samples: Sequence[SampleRecord]) -> None:
        """Append rollouts of a step."""
        self._samples.append({"step": step, **sample_row(sample)} for sample in samples)

    def close(self) -> None:
        """Close the files and end the mirrors; a second call does nothing."""
        self._opened.close()


def read_metrics(run_dir: str | Path) -> list[dict[str, Any]]:
    """Lines of metrics.jsonl, numbers as floats ("nan" too). A torn last line is left out with a warning.

    Raises `DataError` if the file is missing or broken elsewhere. `read_jsonl` gives the count of torn lines.
    """
    path = Path(run_dir) / METRICS_FILE
    lines = read_jsonl(path)
    if lines.num_torn:
        logger.warning("%s: the last line is cut off (a killed run); %d line left out", path, lines.num_torn)
    return [{key: float(v) if v in NON_FINITE else v for key, v in record.items()} for record in lines.records]


class _TensorBoard:
    """Scalars as TensorBoard events. A resumed run tells TensorBoard to forget the steps that are done again."""

    def __init__(self, folder: Path, resume_step: int | None) -> None:
        self._folder = folder
        self._writer = EventFileWriter(str(folder))
        if resume_step is not None:
            started = SessionLog(status=SessionLog.START)
            self._writer.add_event(Event(wall_time=time.time(), step=resume_step + 1, session_log=started))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        values = [Summary.Value(tag=key, simple_value=value) for key, value in metrics.items()]
        try:
            self._writer.add_event(Event(wall_time=time.time(), step=step, summary=Summary(value=values)))
            self._writer.flush()
        except OSError as error:
            raise write_error(self._folder, error) from error

    def close(self) -> None:
        try:
            self._writer.close()
        except OSError as error:
            raise write_error(self._folder, error) from error


class _Wandb:
    """Metrics to Weights & Biases. The run's id lies in output_dir, so that a resumed run goes on under it."""

    def __init__(self, folder: Path, name: str, project: str, *, resume: bool) -> None:
        try:
            import wandb  # pyright: ignore[reportMissingImports]  # optional, and this is its only importer
        except ModuleNotFoundError as error:
            if error.name != "wandb":
                raise
            raise ConfigError(
                f"run.wandb_project is {project!r} but the package wandb is not installed:"
                " `pip install megatron-klear[wandb]`, or leave run.wandb_project out",
                [Fault("run.wandb_project", project, "needs the package wandb", "pip install megatron-klear[wandb]")],
            ) from error
        id_file = folder / "wandb_run_id.txt"
        known = id_file.read_text() if resume and id_file.is_file() else None
        self._run: Any = wandb.init(project=project, name=name, dir=str(folder), id=known, resume="allow")
        id_file.write_text(self._run.id)
        # Our own step as the x axis: wandb's counter only rises, so it would drop what a resumed run does again.
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log({"step": step, **metrics})

    def close(self) -> None:
        self._run.finish()


def _make_ready(folder: Path, resume_step: int | None) -> None:
    """Cut the files back to the step a run goes on from; refuse to mix two runs."""
    paths = (folder / METRICS_FILE, folder / SAMPLES_FILE)
    if resume_step is not None:
        for path in paths:
            cut_after(path, resume_step)
        return
    if used := [path.name for path in paths if path.exists() and path.stat().st_size > 0]:
        raise ConfigError(
            f"{folder} already holds {' and '.join(used)} of another run; expected an empty folder: give another"
            " run.output_dir, go on with checkpoint.resume, or allow its deletion with checkpoint.overwrite",
            [Fault("run.output_dir", str(folder), "holds another run's output")],
        )


def _cannot_use(folder: Path, error: OSError) -> ConfigError:
    where = error.filename or folder
    return ConfigError(
        f"run.output_dir {folder} cannot be written ({where}: {error.strerror or error});"
        " expected a folder that this user may create and write to, with free space",
        [Fault("run.output_dir", str(folder), f"cannot be written: {error.strerror or error}")],
    )
