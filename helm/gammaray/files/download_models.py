"""Downloads models into the Hugging Face cache: python download_models.py FOLDER MODEL...

A file in FOLDER marks each complete model. A model with a mark is not updated, since workers read it.
"""

import sys
from pathlib import Path

from huggingface_hub import HfApi, snapshot_download

# Other formats of the same weights, which the workers do not read.
OTHER = ["*.gguf", "*.onnx*", "*.h5", "*.msgpack", "*.tflite", "original/*", "onnx/*"]
PICKLED = ["*.bin", "*.pt", "*.pth"]

folder = Path(sys.argv[1])
folder.mkdir(parents=True, exist_ok=True)
for model in sys.argv[2:]:
    mark = folder / model.replace("/", "--")
    if mark.exists():
        print(f"{model}: is there", flush=True)
        continue
    files = HfApi().list_repo_files(model)
    has_safetensors = any(file.endswith(".safetensors") for file in files)
    place = snapshot_download(model, ignore_patterns=[*OTHER, *(PICKLED if has_safetensors else [])])
    mark.touch()
    print(f"{model}: {place}", flush=True)
