"""First use of an installed wheel, step by step: `matrix.py` runs it in each environment.

Run by the environment's own Python outside the checkout, with its folder of programs alone on PATH.  It makes
a tiny random model with a tokenizer in the current folder, so that nothing is downloaded, and prints one JSON
object.
"""

from __future__ import annotations

import json
import platform
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from importlib.metadata import metadata
from pathlib import Path
from typing import Any

TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"


def make_model(folder: Path) -> None:
    """Writes a random Llama whose tokenizer knows every byte."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    words = {word: i for i, word in enumerate(["<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    tokenizer = Tokenizer(models.BPE(vocab=words, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="</s>"
    )
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(
        **sizes, **heads, vocab_size=len(words), max_position_embeddings=512, bos_token_id=0, eos_token_id=1
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)


def ask_server(folder: Path) -> str:
    """Starts the server on a folder, asks for a chat answer, and stops it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    program = Path(sys.executable).with_name("torch-armllm")
    with Path("server.log").open("w") as log:
        server = subprocess.Popen([program, "serve", folder, "--port", str(port)], stdout=log, stderr=log)
    url = f"http://127.0.0.1:{port}"
    try:
        for _ in range(600):
            if server.poll() is not None:
                raise RuntimeError(f"the server ended:\n{Path('server.log').read_text()[-2000:]}")
            try:
                urllib.request.urlopen(f"{url}/health", timeout=5)
                break
            except OSError:
                time.sleep(0.5)
        body = {"model": "any", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
        models = json.load(urllib.request.urlopen(f"{url}/v1/models", timeout=60))
        body["model"] = models["data"][0]["id"]
        request = urllib.request.Request(
            f"{url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        answer = json.load(urllib.request.urlopen(request, timeout=120))
        return f"{answer['usage']['completion_tokens']} tokens"
    finally:
        server.terminate()
        server.wait(60)


def main(emulated: bool) -> int:
    """Runs the steps; prints versions and the outcome of each.

    Args:
        emulated: leave out steps that start programs, which an emulator of one process cannot do.
    """
    report: dict[str, Any] = {"python": platform.python_version(), "machine": platform.machine(), "steps": {}}
    state: dict[str, Any] = {}

    def step(name: str, run: Callable[[], Any]) -> bool:
        begin = time.monotonic()
        try:
            seen = run()
        except Exception as error:
            report["steps"][name] = {"failed": f"{type(error).__name__}: {error}"[:2000]}
            return False
        report["steps"][name] = {"seen": str(seen), "seconds": round(time.monotonic() - begin, 1)}
        return True

    def no_compiler() -> str:
        found = [
            name for name in ("cc", "gcc", "g++", "c++", "clang", "cmake", "ninja") if shutil.which(name)
        ]
        assert not found, f"{found} on PATH"
        return "none"

    def imports() -> str:
        import torch
        import transformers

        import torch_armllm
        from torch_armllm import ops

        report.update(
            torch=torch.__version__, transformers=transformers.__version__, ours=torch_armllm.__version__
        )
        assert "site-packages" in ops.LIBRARY_PATH.as_posix() or "site" in ops.LIBRARY_PATH.parts, (
            ops.LIBRARY_PATH
        )
        return str(ops.variants.machine().selected)

    def patch() -> str:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        import torch_armllm

        make_model(Path("float"))
        state["tokenizer"] = AutoTokenizer.from_pretrained("float")
        state["model"] = AutoModelForCausalLM.from_pretrained("float", dtype="bfloat16")
        report_of_patch = torch_armllm.patch(state["model"], quantization="int4")
        assert torch_armllm.is_patched(state["model"])
        return str(report_of_patch).splitlines()[0]

    def generate() -> str:
        inputs = state["tokenizer"]("Hello", return_tensors="pt")
        state["tokens"] = (
            state["model"].generate(**inputs, max_new_tokens=8, min_new_tokens=8, do_sample=False).tolist()
        )
        return f"{len(state['tokens'][0])} tokens"

    def save() -> str:
        state["model"].save_pretrained("saved")
        state["tokenizer"].save_pretrained("saved")
        return f"{sum(f.stat().st_size for f in Path('saved').iterdir())} bytes"

    def load() -> str:
        import torch_armllm

        model = torch_armllm.load("saved")
        inputs = state["tokenizer"]("Hello", return_tensors="pt")
        tokens = model.generate(**inputs, max_new_tokens=8, min_new_tokens=8, do_sample=False).tolist()
        assert tokens == state["tokens"], f"{tokens} after loading, {state['tokens']} before saving"
        return "the same tokens"

    def transformers_alone() -> str:
        code = (
            "import json; from transformers import AutoModelForCausalLM, AutoTokenizer\n"
            "inputs = AutoTokenizer.from_pretrained('saved')('Hello', return_tensors='pt')\n"
            "model = AutoModelForCausalLM.from_pretrained('saved')\n"
            "tokens = model.generate(**inputs, max_new_tokens=8, min_new_tokens=8, do_sample=False)\n"
            "print(json.dumps(tokens.tolist()))"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-2000:]
        tokens = json.loads(done.stdout.splitlines()[-1])
        assert tokens == state["tokens"], f"{tokens} by transformers alone, {state['tokens']} before saving"
        return "the same tokens"

    def readme() -> str:
        """Runs the README's first lines, as the wheel's metadata has them, with a small model."""
        import torch

        text = str(metadata("torch_armllm").get_payload())
        blocks = re.findall(r"```python\n(.*?)```", text, re.S)[:2]
        names = {"prompts": ["Hello"], "inputs": torch.tensor([[2, 3]])}
        for block in blocks:
            code = re.sub(r'"[A-Z]\w+/[\w.-]+"', '"float"', block).replace(
                "generate(...)", "generate(inputs)"
            )
            exec(code, names)
        return f"{sum(block.count(chr(10)) for block in blocks)} lines of code"

    def llm() -> str:
        from torch_armllm import LLM, SamplingParams

        answers = LLM("saved").generate(
            ["Hello", "Good morning"], SamplingParams(temperature=0, max_tokens=4)
        )
        return f"{sum(len(a.outputs[0].token_ids) for a in answers)} tokens"

    steps: list[tuple[str, Callable[[], Any]]] = [
        ("no compiler", no_compiler),
        ("import", imports),
        ("patch", patch),
        ("generate", generate),
        ("save", save),
        ("load", load),
        ("README", readme),
        ("transformers alone", transformers_alone),
        ("LLM", llm),
    ]
    if emulated:
        steps = [(name, run) for name, run in steps if run not in (no_compiler, transformers_alone)]
    else:
        steps.append(("serve", lambda: ask_server(Path("saved"))))
    good = all(step(name, run) for name, run in steps)
    print(json.dumps(report))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main("--emulated" in sys.argv))
