"""manifest.json: what it holds comes back, and no damaged byte goes unnoticed."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from helpers.fake_checkpoints import SHAPE, make_manifest, save
from megatron_klear.checkpoint.manifest import (
    FORMAT,
    MANIFEST,
    POLICY,
    FileEntry,
    Manifest,
    damaged,
    file_entry,
    find_damage,
    read_manifest,
    write_manifest,
)
from megatron_klear.errors import CheckpointError

METRICS = {"eval/accuracy": 0.1 + 0.2, "train/loss": 1e-300, "train/grad_norm": 1e22, "reward/mean": -0.0}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return save(tmp_path, 5, metrics=METRICS)


def rewrite(folder: Path, **changes: Any) -> None:
    """Change the manifest, and its own checksum with it."""
    body = json.loads((folder / MANIFEST).read_text()) | changes
    body.pop("manifest_sha256")
    digest = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
    (folder / MANIFEST).write_text(json.dumps({"manifest_sha256": digest, **body}))


def test_what_is_written_is_read(checkpoint: Path) -> None:
    found = read_manifest(checkpoint)
    (checkpoint / MANIFEST).unlink()
    wanted = make_manifest(checkpoint, 5, METRICS)
    assert found == wanted
    assert found.metrics == METRICS
    assert found.models[POLICY].shape == SHAPE
    assert found.models["reference"].optimizer is None
    assert set(found.files) == {"__0_0.distcp", "recipe.yaml", "reference/common.pt"}
    assert found.num_bytes == sum(path.stat().st_size for path in checkpoint.rglob("*.*"))


def test_people_can_check_it_by_hand(checkpoint: Path) -> None:
    raw = json.loads((checkpoint / MANIFEST).read_text())
    assert raw["format"] == FORMAT
    assert raw["files"]["reference/common.pt"] == {
        "bytes": 9,
        "sha256": hashlib.sha256(b"reference").hexdigest(),
    }
    assert file_entry(checkpoint / "reference" / "common.pt") == FileEntry(**raw["files"]["reference/common.pt"])


def test_names_and_words_of_any_alphabet(checkpoint: Path) -> None:
    manifest = read_manifest(checkpoint).model_copy(update={"tokenizer": "ünï 漢", "packages": {"naïve": "1"}})
    write_manifest(checkpoint, manifest)
    assert read_manifest(checkpoint) == manifest


def test_metrics_are_finite(checkpoint: Path) -> None:
    body = read_manifest(checkpoint).model_dump()
    for value in (float("nan"), float("inf")):
        with pytest.raises(ValidationError, match="finite"):
            Manifest.model_validate({**body, "metrics": {"eval/accuracy": value}})


def test_no_flipped_bit_goes_unnoticed(checkpoint: Path) -> None:
    """A flip either is an error, or spells the same (1e-300 and 1E-300)."""
    wanted = read_manifest(checkpoint)
    path = checkpoint / MANIFEST
    content = path.read_bytes()
    # 7 and 8 share no divisor: all bits of all parts of the file get their turn.
    flips = range(0, 8 * len(content), 7)
    unnoticed = 0
    for bit in flips:
        changed = bytearray(content)
        changed[bit // 8] ^= 1 << bit % 8
        path.write_bytes(changed)
        try:
            assert read_manifest(checkpoint) == wanted
            unnoticed += 1
        except CheckpointError as error:
            assert str(checkpoint) in str(error)
    assert len(flips) > 1000
    assert unnoticed <= 3


def test_no_cut_goes_unnoticed(checkpoint: Path) -> None:
    content = (checkpoint / MANIFEST).read_bytes()
    for length in range(0, len(content), 31):
        (checkpoint / MANIFEST).write_bytes(content[:length])
        with pytest.raises(CheckpointError, match=r"manifest.json cannot be read .*`megatron-klear checkpoint list`"):
            read_manifest(checkpoint)


def test_without_a_manifest_it_is_no_checkpoint(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "absent"):
        with pytest.raises(CheckpointError, match=rf"{folder} holds no manifest.json; expected .*convert import"):
            read_manifest(folder)
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match=r"manifest.json cannot be read .*Not a directory"):
        read_manifest(tmp_path / "file")
    (tmp_path / MANIFEST).mkdir()
    with pytest.raises(CheckpointError, match=r"manifest.json cannot be read .*Is a directory"):
        read_manifest(tmp_path)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"not json", "cannot be read"),
        (b"\xff\xfe{}", "cannot be read"),
        (b"[1, 2]", "holds a list instead of a JSON object"),
        (b"null", "holds a NoneType instead of a JSON object"),
        (b"{}", "does not match its own checksum"),
    ],
)
def test_what_is_no_manifest_is_named(tmp_path: Path, content: bytes, reason: str) -> None:
    (tmp_path / MANIFEST).write_bytes(content)
    with pytest.raises(CheckpointError, match=f"manifest.json.*{reason}"):
        read_manifest(tmp_path)


def test_a_newer_format_asks_for_an_upgrade(checkpoint: Path) -> None:
    rewrite(checkpoint, format=FORMAT + 1, news="of the future", packages={"megatron-klear": "9.0"})
    with pytest.raises(
        CheckpointError, match=r"has format 2, this megatron-klear reads up to 1; .*9\.0.*: upgrade, or"
    ):
        read_manifest(checkpoint)
    # Whatever a later format makes of the packages.
    rewrite(checkpoint, format=FORMAT + 1, packages=["megatron-klear 9.0"])
    with pytest.raises(CheckpointError, match="has format 2"):
        read_manifest(checkpoint)


@pytest.mark.parametrize("change", [{"step": -1}, {"unknown": 1}, {"format": "one"}, {"files": {"a": {"bytes": 1}}}])
def test_a_field_that_cannot_be_is_named(checkpoint: Path, change: dict[str, Any]) -> None:
    rewrite(checkpoint, **change)
    with pytest.raises(CheckpointError, match=rf"(?s)manifest.json is not a manifest .*{next(iter(change))}"):
        read_manifest(checkpoint)


def test_a_whole_checkpoint_has_no_damage(checkpoint: Path) -> None:
    manifest = read_manifest(checkpoint)
    assert find_damage(checkpoint, manifest) == []
    assert find_damage(checkpoint, manifest, by_size=True) == []
    # A file that nobody asked for is no damage.
    (checkpoint / "notes.txt").touch()
    assert find_damage(checkpoint, manifest) == []


def test_all_damage_is_found(checkpoint: Path) -> None:
    manifest = read_manifest(checkpoint)
    shard = (checkpoint / "__0_0.distcp").read_bytes()
    (checkpoint / "__0_0.distcp").write_bytes(shard[:-1] + bytes([shard[-1] ^ 1]))
    (checkpoint / "recipe.yaml").write_text("tag")
    (checkpoint / "reference" / "common.pt").unlink()
    short = "recipe.yaml has 3 bytes instead of 11"
    missing = "reference/common.pt cannot be read (No such file or directory)"
    flipped = "__0_0.distcp has changed since it was written (its checksum differs)"
    assert find_damage(checkpoint, manifest) == [flipped, short, missing]
    assert find_damage(checkpoint, manifest, ["recipe.yaml"]) == [short]
    assert find_damage(checkpoint, manifest, ["__0_0.distcp"]) == [flipped]
    assert find_damage(checkpoint, manifest, []) == []
    assert find_damage(checkpoint, manifest, by_size=True) == [short, missing]
    (checkpoint / "recipe.yaml").write_text("tag: much longer")
    assert find_damage(checkpoint, manifest, by_size=True) == ["recipe.yaml has 16 bytes instead of 11", missing]
    error = damaged(checkpoint, [short, missing])
    assert str(error).startswith(f"{checkpoint} is damaged: {short}; {missing}. `megatron-klear checkpoint list`")


def test_every_flipped_bit_of_a_file_is_found(checkpoint: Path) -> None:
    manifest = read_manifest(checkpoint)
    path = checkpoint / "reference" / "common.pt"
    content = path.read_bytes()
    for bit in range(8 * len(content)):
        changed = bytearray(content)
        changed[bit // 8] ^= 1 << bit % 8
        path.write_bytes(changed)
        assert len(find_damage(checkpoint, manifest)) == 1
    path.write_bytes(content)
    assert find_damage(checkpoint, manifest) == []


def test_a_folder_in_place_of_a_file_is_damage(checkpoint: Path) -> None:
    manifest = read_manifest(checkpoint)
    (checkpoint / "recipe.yaml").unlink()
    (checkpoint / "recipe.yaml").mkdir()
    assert find_damage(checkpoint, manifest) == ["recipe.yaml is not a file"]
    for path in (checkpoint / "reference").iterdir():
        path.unlink()
    (checkpoint / "reference").rmdir()
    (checkpoint / "reference").touch()
    assert find_damage(checkpoint, manifest, ["reference/common.pt"]) == [
        "reference/common.pt cannot be read (Not a directory)"
    ]
