"""Reads a folder of page images to Markdown by a server, several requests at a time.

torch-armllm serve zai-org/GLM-OCR --max-num-seqs 8
python docs/examples/pages_by_server.py PAGES OUT --prompt "Text Recognition:"

Page 7.png becomes OUT/7.png.md.  Pages that are there already are skipped.  A page that cannot be read is
named, and the others go on.
"""

from __future__ import annotations

import argparse
import base64
import mimetypes
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import openai

SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp")


def read_page(client: openai.OpenAI, model: str, page: Path, prompt: str, max_tokens: int) -> str | Exception:
    """Returns the text of a page, or the reason why it has none."""
    kind = mimetypes.guess_type(page.name)[0]
    url = f"data:{kind};base64,{base64.b64encode(page.read_bytes()).decode()}"
    parts: list[dict[str, object]] = [{"type": "image_url", "image_url": {"url": url}}]
    if prompt:
        parts.append({"type": "text", "text": prompt})
    try:
        answer = client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": parts}],  # type: ignore[list-item,misc]
            temperature=0,
            max_tokens=max_tokens,
        )
    except openai.APIStatusError as error:
        return error
    choice = answer.choices[0]
    if choice.finish_reason == "length":
        return ValueError(f"its text is longer than {max_tokens} tokens")
    return choice.message.content or ""


def main(arguments: Sequence[str] | None = None) -> int:
    """Reads the pages; returns 1 if one of them could not be read."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("pages", type=Path, help="folder of page images")
    parser.add_argument("out", type=Path, help="folder for Markdown")
    parser.add_argument("--server", default="http://127.0.0.1:8000", help="address of the server")
    parser.add_argument("--key", default="none", help="API key")
    parser.add_argument("--prompt", default="Text Recognition:", help="what the model's card asks for")
    parser.add_argument("--requests", type=int, default=8, help="requests at a time")
    parser.add_argument("--max-tokens", type=int, default=4096, help="most tokens of a page")
    options = parser.parse_args(arguments)

    options.out.mkdir(parents=True, exist_ok=True)
    names = {
        page: options.out / f"{page.name}.md"
        for page in sorted(options.pages.iterdir())
        if page.suffix.lower() in SUFFIXES
    }
    pages = [page for page, name in names.items() if not name.exists()]
    # a page waits for those before it, and may take minutes itself
    client = openai.OpenAI(base_url=f"{options.server}/v1", api_key=options.key, timeout=3600)
    model = client.models.list().data[0].id

    def read(page: Path) -> str | Exception:
        return read_page(client, model, page, options.prompt, options.max_tokens)

    failed = 0
    with ThreadPoolExecutor(options.requests) as pool:
        for page, text in zip(pages, pool.map(read, pages), strict=True):
            if isinstance(text, str):
                names[page].write_text(text, encoding="utf-8")
            else:
                failed += 1
                print(f"{page.name}: {text}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
