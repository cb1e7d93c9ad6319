"""Build hooks: generate the reference from the source, without importing torch.

A comment ``<!-- generated: NAME arguments -->`` in a page is replaced by the table of that name.  A link to
a file outside of docs/ leads to a page that shows the file.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "build/docs/torch_armllm"
_MARKER = re.compile(r"<!-- generated: (.+?) -->")
_LINK = re.compile(r"\]\(((?:\.\./)+[^)\s#]+)(#[^)\s]*)?\)")
_LANGUAGES = {
    ".py": "python",
    ".cpp": "cpp",
    ".h": "cpp",
    ".sh": "bash",
    ".def": "cpp",
    ".toml": "toml",
    ".json": "json",
    ".yml": "yaml",
}


def on_startup(command: str, dirty: bool) -> None:
    """Copy the package's Python files as they are installed: `ops` and `passes` inside it.

    This comes before plugins read their configuration: mkdocstrings drops search paths that do not exist yet.
    """
    shutil.rmtree(PACKAGE.parent, ignore_errors=True)
    for source, target in (("torch_armllm", ""), ("ops", "ops"), ("passes", "passes")):
        for path in (ROOT / source).rglob("*.py"):
            copy = PACKAGE / target / path.relative_to(ROOT / source)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, copy)


def on_files(files: Any, config: Any) -> Any:
    """Add a page for every source file that a page links to."""
    from mkdocs.structure.files import File

    pages = [file for file in files.documentation_pages() if file.abs_src_path is not None]
    linked = {target for page in pages for target in _source_links(Path(page.abs_src_path))}
    for path in sorted(linked):
        name = path.relative_to(ROOT).as_posix()
        files.append(File.generated(config, f"source/{name}.md", content=_source_page(path, name)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Fill in generated tables, and point links to source files at their pages."""
    folder = Path(page.file.src_uri).parent
    if folder.parts[:1] == ("source",):
        return markdown
    up = "../" * len(folder.parts)

    def point(match: re.Match[str]) -> str:
        path = _outside(ROOT / "docs" / folder, match[1])
        return match[0] if path is None else f"]({up}source/{path.relative_to(ROOT).as_posix()}.md)"

    return _MARKER.sub(lambda match: generate(*match[1].split()), _LINK.sub(point, markdown))


def generate(name: str, *arguments: str) -> str:
    """Return the generated part of a page.

    Raises:
        KeyError: there is no generator of that name.
    """
    generators: dict[str, Callable[..., str]] = {
        "cli": cli,
        "fields": fields,
        "ops": ops,
        "passes": passes,
        "settings": settings,
    }
    return generators[name](*arguments)


def cli() -> str:
    """Return every command with its arguments, from the argument parsers."""
    parser = _module("torch_armllm.cli.main").build_parser()
    return "\n".join(_command(parser, "", _module("torch_armllm.cli.parser")))


def settings(module: str, *names: str) -> str:
    """Return a table of the settings that dataclasses declare: name, type, default and meaning."""
    rows = ["| name | type | default | meaning |", "|---|---|---|---|"]
    for name in names:
        for field, declared in _module("torch_armllm.system.settings").settings_of(
            getattr(_module(module), name)
        ):
            cells = f"`{field.name}`", _code(_plain(field.type)), _code(repr(field.default))
            rows.append(f"| {' | '.join(cells)} | {_cell(declared.meaning)} |")
    return "\n".join(rows)


def _module(name: str) -> Any:
    """Return a module of the checkout; those of settings and options import no torch."""
    sys.path.insert(0, str(ROOT))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(ROOT))


def _command(parser: argparse.ArgumentParser, about: str, texts: Any) -> Iterator[str]:
    subcommands = [a for a in parser._actions if isinstance(a, argparse._SubParsersAction)]
    left_out = argparse._SubParsersAction, argparse._HelpAction, argparse._VersionAction
    own = [action for action in parser._actions if not isinstance(action, left_out)]
    if own:
        yield f"## {parser.prog.removeprefix('torch-armllm ')}\n\n{_sentence(about)}\n"
        yield f"```text\n{parser.format_usage().removeprefix('usage: ').strip()}\n```\n"
        yield "| argument | meaning |\n|---|---|"
        yield from (f"| {_argument(a, texts)} | {_cell(texts.help_text(a) % vars(a))} |" for a in own)
        yield ""
        if parser.epilog:
            yield f"```sh\n{textwrap.dedent(parser.epilog.partition('examples:')[2]).strip()}\n```\n"
    for action in subcommands:
        abouts = {choice.dest: choice.help or "" for choice in action._choices_actions}
        for name, sub in action.choices.items():
            yield from _command(sub, abouts.get(name, ""), texts)


def _argument(action: argparse.Action, texts: Any) -> str:
    if not action.option_strings:
        return f"`{texts.positional_usage(action)}`"
    names = ", ".join(f"`{name}`" for name in action.option_strings)
    if action.nargs == 0:
        return names
    if action.choices:
        value = " ".join(f"`{choice}`" for choice in action.choices)
        return f"{names} {value}"
    shown = action.metavar or action.dest.upper()
    return f"{names} `{shown if isinstance(shown, str) else ' '.join(shown)}`"


def fields(path: str, *names: str) -> str:
    """Return a table of a class's fields: name, type, default and the text of its docstring."""
    classes = {n.name: n for n in ast.parse((ROOT / path).read_text()).body if isinstance(n, ast.ClassDef)}
    if missing := [name for name in names if name not in classes]:
        raise KeyError(f"{path} has no class {missing[0]}; it has {', '.join(classes)}")
    described = any(_attributes(ast.get_docstring(classes[name]) or "") for name in names)
    rows = ["| name | type | default | meaning |" if described else "| name | type | default |"]
    rows.append("|---|---|---|---|" if described else "|---|---|---|")
    for name in names:
        texts = _attributes(ast.get_docstring(classes[name]) or "")
        for node in classes[name].body:
            if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name):
                continue
            default = ast.unparse(node.value) if node.value is not None else ""
            if "init=False" in default:
                continue
            field, type_ = _field_name(node.target.id, default), _plain(ast.unparse(node.annotation))
            row = f"| `{field}` | {_code(type_)} | {_code(_default(default))} |"
            rows.append(f"{row} {_cell(texts.get(node.target.id, ''))} |" if described else row)
    constants = _constants(ROOT / path)
    return re.sub(r"\b[A-Z_]{4,}\b", lambda match: constants.get(match[0], match[0]), "\n".join(rows))


def _constants(path: Path) -> dict[str, str]:
    """Return the whole numbers that a module defines or imports from another one of ours, by name."""
    constants: dict[str, str] = {}
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch_armllm."):
            imported = ROOT / f"{(node.module or '').replace('.', '/')}.py"
            if imported.exists() and any(alias.name.isupper() for alias in node.names):
                constants |= _constants(imported)
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            value = getattr(node.value, "value", None)
            if isinstance(value, int):
                constants[node.targets[0].id] = str(value)
    return constants


def _plain(annotation: str) -> str:
    """Shorten ``Annotated[int, Field(ge=0)]`` to ``int (ge=0)``."""
    while match := re.search(r"Annotated\[(.+?), Field\(([^()]*)\)\]", annotation):
        annotation = f"{annotation[: match.start()]}{match[1]} ({match[2]}){annotation[match.end() :]}"
    return annotation.replace("_Texts", "list[str]").replace("_Text", "str")


def _field_name(name: str, default: str) -> str:
    alias = re.search(r"alias='(\w+)'", default)
    return alias[1] if alias else name


def _default(default: str) -> str:
    if match := re.match(r"Field\(default=([^,)]+)", default):
        return match[1]
    if match := re.match(r"field\(default=([^,)]+(?:\(\))?\)?)", default):
        return match[1]
    if match := re.match(r"field\(default_factory=(.+?)\)$", default):
        return {"list": "[]", "dict": "{}"}.get(match[1], "")
    return default


def _attributes(docstring: str) -> dict[str, str]:
    """Return the texts of a Google-style section of attributes by name."""
    section = re.search(r"^Attributes:\n((?:[ \t]+.*\n?|\n)+)", docstring, re.M)
    texts: dict[str, str] = {}
    names: list[str] = []
    for line in section[1].splitlines() if section else ():
        if match := re.match(r" {4}([\w, ]+): (.*)", line):
            names = match[1].split(", ")
            texts.update(dict.fromkeys(names, match[2]))
        elif line.strip() and names:
            texts.update({name: f"{texts[name]} {line.strip()}" for name in names})
    return texts


def ops() -> str:
    """Return the operators by section of ops/schemas.cpp."""
    text = (ROOT / "ops/schemas.cpp").read_text()
    text = re.sub(r'"\n\s*"', "", text)
    out = []
    for line in text.splitlines():
        if match := re.match(r'\s*m\.def\("(.+)"\);', line):
            out.append(match[1])
        elif (match := re.match(r"\s+// (.+)", line)) and "clang-format" not in line:
            out.append(f"# {match[1]}")
    return "```text\n" + "\n".join(out) + "\n```"


def passes() -> str:
    """Return the passes in their order, each with the first sentence of its module."""
    tree = ast.parse((ROOT / "passes/__init__.py").read_text())
    table = next(
        node.value
        for node in tree.body
        if isinstance(node, ast.AnnAssign) and getattr(node.target, "id", "") == "PASSES"
    )
    assert isinstance(table, ast.Tuple)
    rows = ["| pass | file | purpose |", "|---|---|---|"]
    for entry in table.elts:
        assert isinstance(entry, ast.Tuple)
        name, function = entry.elts
        module = function.value.id if isinstance(function, ast.Attribute) else ast.unparse(function)
        docstring = ast.get_docstring(ast.parse((ROOT / f"passes/{module}.py").read_text())) or ""
        first = docstring.split("\n\n")[0]
        rows.append(f"| `{ast.literal_eval(name)}` | `passes/{module}.py` | {_cell(first)} |")
    return "\n".join(rows)


def _source_links(page: Path) -> Iterator[Path]:
    for match in _LINK.finditer(page.read_text(encoding="utf-8")):
        path = _outside(page.parent, match[1])
        if path is not None:
            yield path


def _outside(folder: Path, link: str) -> Path | None:
    """Return the file that a link names if it is a file of the checkout outside of docs/."""
    path = (folder / link).resolve()
    inside = path.is_relative_to(ROOT / "docs")
    return path if path.is_file() and path.is_relative_to(ROOT) and not inside else None


def _source_page(path: Path, name: str) -> str:
    language = _LANGUAGES.get(path.suffix, "text")
    return f"# {path.name}\n\n`{name}`\n\n``````{language}\n{path.read_text(encoding='utf-8')}\n``````\n"


def _code(text: str) -> str:
    return f"`{text}`".replace("|", "\\|") if text else ""


def _cell(text: str) -> str:
    return re.sub(r"\s+", " ", text.replace("``", "`")).replace("|", "\\|").strip()


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:].rstrip(".") + "." if text else ""
