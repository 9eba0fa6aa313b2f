"""accelerate's offload: `device_map="auto"`, a part on the CPU, the rest read from disk."""

from __future__ import annotations

import tempfile
import time

from report import arguments, prompt_ids, report


def main() -> None:
    given = arguments(
        __doc__,
        offload=lambda parser: parser.add_argument(
            "--offload-folder", help="default: a temporary folder beside the model"
        ),
        gpu=lambda parser: parser.add_argument(
            "--gpu", type=int, metavar="BYTES", help="of weights on the first card; default: none"
        ),
    )
    if not given.ram:
        raise SystemExit("error: --ram must say how much accelerate may keep on the CPU")
    import accelerate
    import torch
    import transformers
    from torch_generate import timed_generate

    transformers.logging.set_verbosity_error()
    torch.set_num_threads(given.threads)
    ram = int(given.ram) if given.ram.isdigit() else given.ram
    card = {} if given.gpu is None else {0: given.gpu}
    with tempfile.TemporaryDirectory(dir=given.offload_folder) as folder:
        began = time.monotonic()
        model = transformers.AutoModelForCausalLM.from_pretrained(
            given.model,
            dtype=torch.bfloat16,
            attn_implementation="sdpa",
            device_map="auto",
            max_memory={"cpu": ram, **card},
            offload_folder=folder,
        ).eval()
        load_s = time.monotonic() - began
        devices = list(getattr(model, "hf_device_map", {}).values())
        ids = prompt_ids(given.prompt_tokens, given.vocab)
        if given.warmup:
            timed_generate(
                model, prompt_ids(given.prompt_tokens, given.vocab, seed=1), given.warmup
            )
        marks, tokens = timed_generate(model, ids, given.new_tokens)
        report(
            "accelerate",
            f"{accelerate.__version__} (transformers {transformers.__version__})",
            {
                "dtype": "bfloat16",
                "threads": given.threads,
                "max_memory_cpu": given.ram,
                "max_memory_gpu": given.gpu,
                "modules_on_cpu": sum(str(device) == "cpu" for device in devices),
                "modules_on_disk": sum(str(device) == "disk" for device in devices),
            },
            marks,
            len(ids),
            load_s,
            tokens,
        )


if __name__ == "__main__":
    main()
