"""Packaging: two top-level packages, `megatron_klear` and `megatron_klear_kernels`.

`kernels/` is a folder, never a package: `kernels` is another project's name on PyPI, which transformers imports, and a
wheel that installed it would overwrite that project's files.
"""

import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent
KERNELS = "megatron_klear_kernels"


def read_version() -> str:
    """`__version__` of the package, read as text: importing it would need what is not installed yet."""
    source = (ROOT / "megatron_klear" / "__init__.py").read_text(encoding="utf-8")
    match = re.search(r'^__version__ = "([^"]+)"$', source, re.MULTILINE)
    if match is None:
        raise RuntimeError('megatron_klear/__init__.py must hold a line __version__ = "X.Y.Z"')
    return match.group(1)


DEPENDENCIES = [
    "torch>=2.6",
    "megatron-core>=0.16.1,<0.20",
    "numpy",
    "pydantic>=2.8",
    "pyyaml",
    "safetensors",
    "transformers>=5",
    "datasets>=3",
    "httpx>=0.27",
    "math-verify>=0.8",
    "matplotlib",
    "tensorboard",
    "tqdm",
    # Megatron's checkpoint writer imports it without declaring it.
    "psutil",
    # megatron-core 0.17 and newer (Python 3.12 and newer only) import it unconditionally without declaring it.
    "triton; python_version >= '3.12' and sys_platform == 'linux'",
]

EXTRAS = {
    # nemo-run asks for leptonai>=0.26.6, but cannot be imported with releases that dropped leptonai.api.v1.
    "nemo": ["nemo-run==0.11.1", "leptonai==0.27.3"],
    "te": ["transformer-engine[pytorch]"],
    "wandb": ["wandb"],
    # Engines pin a torch of their own: install these in an environment of their own, without constraints/.
    "vllm": ["vllm"],
    "sglang": ["sglang"],
    # setuptools and wheel: the packaging test builds a wheel without a network. nodejs: pyright runs on it.
    # triton: its interpreter runs the kernels' tests on a CPU.
    "dev": [
        "pytest",
        "hypothesis",
        "ruff",
        "pyright[nodejs]",
        "build",
        "setuptools>=77",
        "wheel",
        "triton; sys_platform == 'linux'",
    ],
}

setup(
    name="megatron-klear",
    version=read_version(),
    description="Train reasoning models on Megatron-Core by long chain-of-thought SFT and GPPO",
    long_description=(ROOT / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license_expression="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.11",
    packages=[
        *find_packages(include=["megatron_klear", "megatron_klear.*"]),
        KERNELS,
        *(f"{KERNELS}.{name}" for name in find_packages(f"kernels/{KERNELS}")),
    ],
    package_dir={KERNELS: f"kernels/{KERNELS}"},
    # Compiled where they run.
    package_data={f"{KERNELS}.native": ["*.c"]},
    install_requires=DEPENDENCIES,
    extras_require=EXTRAS,
    entry_points={"console_scripts": ["megatron-klear = megatron_klear.cli:main"]},
    classifiers=[
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
)
