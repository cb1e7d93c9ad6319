"""Coding agents from npm: their releases, and the settings that keep each to a server on loopback."""

from __future__ import annotations

import json
import platform
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

_CPU = {"x86_64": "x64", "aarch64": "arm64"}.get(platform.machine(), platform.machine())
_INSTALL_SECONDS = 600


@dataclass(frozen=True)
class Server:
    """The server that an agent is to use.

    Attributes:
        base: its URL.
        model: name of the model.
    """

    base: str
    model: str


@dataclass(frozen=True)
class Agent:
    """A coding agent.

    Attributes:
        package: its name on npm.
        version: the release.
        program: path below ``node_modules``; a script is run by node.
        arguments: before the task; from the server.
        environment: from the server.
        settings: path below the home folder and text of its settings; from the server.
        asks: hosts of which no setting keeps it; it works without them.
    """

    package: str
    version: str
    program: str
    arguments: Callable[[Server], list[str]]
    environment: Callable[[Server], dict[str, str]] = lambda server: {}
    settings: Callable[[Server], dict[str, str]] = lambda server: {}
    asks: frozenset[str] = frozenset()

    def install(self, cache: Path) -> list[str]:
        """Installs the agent below a folder, unless it is there; returns its command.

        Skips the test where there is no node or npm, or npm cannot install the package.
        """
        if (node := shutil.which("node")) is None or (npm := shutil.which("npm")) is None:
            pytest.skip("needs node and npm")
        folder = cache / f"{self.package.replace('/', '+')}-{self.version}"
        program = folder / "node_modules" / self.program
        if not program.exists():
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "package.json").write_text("{}")
            how = ["--ignore-scripts", "--no-audit", "--no-fund", "--no-save"]
            command = [npm, "install", *how, f"{self.package}@{self.version}"]
            done = subprocess.run(
                command, cwd=folder, capture_output=True, text=True, timeout=_INSTALL_SECONDS, check=False
            )
            if done.returncode or not program.exists():
                reason = done.stderr.strip()[-300:] or f"it has no program for {_CPU}"
                pytest.skip(f"npm cannot install {self.package}@{self.version}: {reason}")
        return [node, str(program)] if program.suffix in (".js", ".cjs", ".mjs") else [str(program)]


def _qwen_code_settings(server: Server) -> dict[str, str]:
    settings = {
        "security": {"auth": {"selectedType": "openai"}},
        "general": {"enableAutoUpdate": False},
        "privacy": {"usageStatisticsEnabled": False},
        "telemetry": {"enabled": False},
    }
    return {".qwen/settings.json": json.dumps(settings)}


def _opencode_settings(server: Server) -> dict[str, str]:
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "options": {"baseURL": f"{server.base}/v1", "apiKey": "none"},
        "models": {server.model: {"limit": {"context": 131072, "output": 8192}}},
    }
    settings = {
        "model": f"local/{server.model}",
        "small_model": f"local/{server.model}",
        "provider": {"local": provider},
        "enabled_providers": ["local"],
        "autoupdate": False,
        "share": "disabled",
        "permission": "allow",
    }
    return {".config/opencode/opencode.json": json.dumps(settings)}


def _codex_settings(server: Server) -> dict[str, str]:
    return {
        ".codex/config.toml": f"""
model = "{server.model}"
model_provider = "local"
check_for_update_on_startup = false
web_search = "disabled"

[model_providers.local]
name = "torch_armllm"
base_url = "{server.base}/v1"
wire_api = "responses"

[features]
apps = false
plugins = false
remote_plugin = false

[analytics]
enabled = false

[otel]
exporter = "none"
metrics_exporter = "none"
"""
    }


def _claude_code_environment(server: Server) -> dict[str, str]:
    models = ("ANTHROPIC_MODEL", "ANTHROPIC_DEFAULT_HAIKU_MODEL", "ANTHROPIC_SMALL_FAST_MODEL")
    return {
        "ANTHROPIC_BASE_URL": server.base,
        "ANTHROPIC_AUTH_TOKEN": "none",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
        "DISABLE_AUTOUPDATER": "1",
        **dict.fromkeys(models, server.model),
    }


AGENTS = {
    "claude-code": Agent(
        "@anthropic-ai/claude-code",
        "2.1.332",
        f"@anthropic-ai/claude-code-linux-{_CPU}/claude",
        lambda server: ["--allowedTools", "Read,Edit,Bash", "-p"],
        environment=_claude_code_environment,
    ),
    "codex": Agent(
        "@openai/codex",
        "0.171.0",
        "@openai/codex/bin/codex.js",
        lambda server: ["exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"],
        settings=_codex_settings,
    ),
    "opencode": Agent(
        "opencode-ai",
        "1.18.33",
        f"opencode-linux-{_CPU}/bin/opencode",
        lambda server: ["run"],
        environment=lambda server: {
            "OPENCODE_DISABLE_AUTOUPDATE": "1",
            "OPENCODE_DISABLE_MODELS_FETCH": "1",
            "OPENCODE_DISABLE_LSP_DOWNLOAD": "1",
            "OPENCODE_DISABLE_DEFAULT_PLUGINS": "1",
        },
        settings=_opencode_settings,
        asks=frozenset({"registry.npmjs.org:443"}),
    ),
    "qwen-code": Agent(
        "@qwen-code/qwen-code",
        "0.24.4",
        "@qwen-code/qwen-code/cli-entry.js",
        lambda server: ["--yolo"],
        environment=lambda server: {
            "OPENAI_API_KEY": "none",
            "OPENAI_BASE_URL": f"{server.base}/v1",
            "OPENAI_MODEL": server.model,
        },
        settings=_qwen_code_settings,
    ),
}
"""The agents by name."""
