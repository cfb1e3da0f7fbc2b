#!/usr/bin/env bash
# Makes an environment in which SGLang serves on a host without a GPU (3 GB, some minutes).
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
# torch with what it needs, which differs between its CPU and its CUDA build. The rest without: SGLang's own list asks
# for CUDA packages that do not load here.
install "$(grep '^torch==' "$here/requirements.txt")"
install --no-deps -r "$here/requirements.txt"
cp "$here/requirements.txt" "$stamp"
