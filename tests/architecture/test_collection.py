"""No folder of tests is passed over."""

from __future__ import annotations

from fnmatch import fnmatch

import pytest

from architecture.source_tree import ROOT


def test_pytest_goes_into_every_folder_of_tests(pytestconfig: pytest.Config) -> None:
    """Its own list of folders to leave out has "dist" in it."""
    patterns = pytestconfig.getini("norecursedirs")
    folders = {path.parent.relative_to(ROOT) for path in (ROOT / "tests").rglob("test_*.py")}
    assert len(folders) > 10
    left_out = [folder for folder in folders if any(fnmatch(part, one) for part in folder.parts for one in patterns)]
    assert not left_out
