"""Downloads models into the Hugging Face cache, then creates FILE: python download_models.py FILE MODEL..."""

import sys
from pathlib import Path

from huggingface_hub import HfApi, snapshot_download

# Other formats of the same weights, which the workers do not read.
OTHER = ["*.gguf", "*.onnx*", "*.h5", "*.msgpack", "*.tflite", "original/*", "onnx/*"]
PICKLED = ["*.bin", "*.pt", "*.pth"]

done, models = Path(sys.argv[1]), sys.argv[2:]
for model in models:
    files = HfApi().list_repo_files(model)
    has_safetensors = any(file.endswith(".safetensors") for file in files)
    place = snapshot_download(model, ignore_patterns=[*OTHER, *(PICKLED if has_safetensors else [])])
    print(f"{model}: {place}", flush=True)
done.parent.mkdir(parents=True, exist_ok=True)
done.touch()
