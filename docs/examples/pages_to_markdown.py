"""Reads a folder of page images to Markdown, a batch of pages at a time.

python docs/examples/pages_to_markdown.py PAGES OUT --model zai-org/GLM-OCR --prompt "Text Recognition:"

Page 7.png becomes OUT/7.png.md.  Pages that are there already are skipped, so the command can be run again
after an interruption.  A page that cannot be read is named, and the others go on.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from torch_armllm import LLM, SamplingParams

SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp")


def read_pages(
    llm: LLM, pages: Sequence[Path], prompt: str, params: SamplingParams
) -> dict[Path, str | ValueError]:
    """Returns the text of each page, or the reason why it has none."""
    words = [{"type": "text", "text": prompt}] if prompt else []
    conversations = []
    for page in pages:
        image = {"type": "image_url", "image_url": {"url": page.resolve().as_uri()}}
        conversations.append([{"role": "user", "content": [image, *words]}])
    try:
        outputs = llm.chat(conversations, params, use_tqdm=False)
    except ValueError as error:  # of any page, and before a token of the batch is generated
        if len(pages) == 1:
            return {pages[0]: error}
        alone = [read_pages(llm, [page], prompt, params) for page in pages]
        return {page: text for each in alone for page, text in each.items()}
    found: dict[Path, str | ValueError] = {}
    for page, output in zip(pages, outputs, strict=True):
        answer = output.outputs[0]
        cut = ValueError(f"its text is longer than {params.max_tokens} tokens")
        found[page] = cut if answer.finish_reason == "length" else answer.text
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Reads the pages; returns 1 if one of them could not be read."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("pages", type=Path, help="folder of page images")
    parser.add_argument("out", type=Path, help="folder for Markdown")
    parser.add_argument("--model", default="zai-org/GLM-OCR", help="folder or hub name")
    parser.add_argument("--prompt", default="Text Recognition:", help="what the model's card asks for")
    parser.add_argument("--batch", type=int, default=8, help="pages that are in memory at a time")
    parser.add_argument("--max-tokens", type=int, default=4096, help="most tokens of a page")
    options = parser.parse_args(arguments)

    options.out.mkdir(parents=True, exist_ok=True)
    names = {
        page: options.out / f"{page.name}.md"
        for page in sorted(options.pages.iterdir())
        if page.suffix.lower() in SUFFIXES
    }
    pages = [page for page, name in names.items() if not name.exists()]
    llm = LLM(options.model, max_num_seqs=options.batch, allowed_media_path=options.pages)
    params = SamplingParams(temperature=0, max_tokens=options.max_tokens)
    failed = 0
    for first in range(0, len(pages), options.batch):
        batch = pages[first : first + options.batch]
        for page, text in read_pages(llm, batch, options.prompt, params).items():
            if isinstance(text, str):
                names[page].write_text(text, encoding="utf-8")
            else:
                failed += 1
                print(f"{page.name}: {text}", file=sys.stderr)
        print(f"{min(first + options.batch, len(pages))} of {len(pages)} pages")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
