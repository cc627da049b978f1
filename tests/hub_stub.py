"""A stand-in for the Hugging Face Hub on the loopback interface: just the routes that pushing and loading a model use.

    with HubStub() as hub:
        ... run a process with `hub.environment(folder)` ...
        hub.repositories["tester/name"]["config.json"]  # bytes

The libraries read these variables when they are imported. For uploads from this process, use `patch` instead.
"""

import base64
import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import huggingface_hub.constants
import huggingface_hub.hf_api
import transformers.utils.hub


class HubStub:
    """The server, and what was uploaded to it: `repositories[id][file]` is the content."""

    def __init__(self) -> None:
        self.repositories: dict[str, dict[str, bytes]] = {}
        self.private: set[str] = set()  # repositories that were created as private
        self.unknown: list[str] = []  # requests that the stub has no answer for
        handler = type("Handler", (_Handler,), {"hub": self})
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def __enter__(self) -> "HubStub":
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: Any) -> None:
        self.server.shutdown()
        self.server.server_close()

    def environment(self, folder: Path) -> dict[str, str]:
        """Variables that point a new process at this server, with its caches in `folder`."""
        return {
            "HF_ENDPOINT": self.url,
            "HF_TOKEN": "hf_stub",
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "HF_HUB_OFFLINE": "0",
            "HF_HOME": str(folder / "home"),
            "HF_MODULES_CACHE": str(folder / "modules"),
            "NO_PROXY": "127.0.0.1",
            "no_proxy": "127.0.0.1",
        }

    def patch(self, monkeypatch: Any, folder: Path) -> None:
        """Point this process at the server, with a cache in `folder`."""
        monkeypatch.setenv("HF_TOKEN", "hf_stub")
        settings = {
            "ENDPOINT": self.url,
            "HUGGINGFACE_CO_URL_TEMPLATE": self.url + "/{repo_id}/resolve/{revision}/{filename}",
            "HF_HUB_CACHE": str(folder / "cache"),
            "HF_HUB_OFFLINE": False,
            "HF_HUB_DISABLE_XET": True,
            "HF_HUB_DISABLE_TELEMETRY": True,
        }
        for name, value in settings.items():
            monkeypatch.setattr(huggingface_hub.constants, name, value)
        # Both libraries keep a client with the endpoint of its first use.
        monkeypatch.setattr(huggingface_hub.hf_api.api, "endpoint", self.url)
        monkeypatch.setattr(transformers.utils.hub, "_hf_api", None, raising=False)


def _sha(files: dict[str, bytes]) -> str:
    return hashlib.sha1(b"".join(name.encode() + files[name] for name in sorted(files))).hexdigest()


class _Handler(BaseHTTPRequestHandler):
    hub: HubStub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        """Quiet."""

    def answer(self, content: Any, status: int = 200, **headers: str) -> None:
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        # As the Hub writes it: a HEAD request names the length, too.
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def missing(self) -> None:
        self.hub.unknown.append(f"{self.command} {self.path}")
        self.answer({"error": "Not found"}, 404)

    def body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        content = b""
        while size := int(self.rfile.readline(), 16):
            content += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return content

    def do_POST(self) -> None:
        path, body = unquote(urlsplit(self.path).path), self.body()
        parts = path.strip("/").split("/")
        if path == "/api/repos/create":
            data = json.loads(body)
            repo = f"{data.get('organization') or 'tester'}/{data['name']}"
            exists = repo in self.hub.repositories
            self.hub.repositories.setdefault(repo, {})
            if data.get("private") or data.get("visibility") == "private":
                self.hub.private.add(repo)
            self.answer({"url": f"{self.hub.url}/{repo}", "name": repo}, 409 if exists else 200)
        elif path == "/api/validate-yaml":
            self.answer({"errors": [], "warnings": []})
        elif parts[:2] == ["api", "models"] and parts[4:5] == ["preupload"]:
            # The Hub itself wants large files in its storage for them.
            mode = {"uploadMode": "regular", "shouldIgnore": False}
            self.answer({"files": [{"path": file["path"], **mode} for file in json.loads(body)["files"]]})
        elif parts[:2] == ["api", "models"] and parts[4:5] == ["commit"]:
            self.commit(f"{parts[2]}/{parts[3]}", body)
        else:
            self.missing()

    def commit(self, repo: str, body: bytes) -> None:
        files = self.hub.repositories[repo]
        for line in body.splitlines():
            entry = json.loads(line)
            value = entry["value"]
            if entry["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif entry["key"] == "deletedFile":
                files.pop(value["path"], None)
        sha = _sha(files)
        self.answer({"success": True, "commitOid": sha, "commitUrl": f"{self.hub.url}/{repo}/commit/{sha}"})

    def do_GET(self) -> None:
        parts = unquote(urlsplit(self.path).path).strip("/").split("/")
        if parts == ["api", "whoami-v2"]:
            self.answer({"type": "user", "name": "tester", "orgs": [], "auth": {}})
        elif parts[:2] == ["api", "models"] and "/".join(parts[2:4]) in self.hub.repositories:
            self.describe("/".join(parts[2:4]), parts[4:])
        elif parts[2:3] == ["resolve"] and "/".join(parts[:2]) in self.hub.repositories:
            self.resolve("/".join(parts[:2]), "/".join(parts[4:]))
        else:
            self.missing()

    do_HEAD = do_GET

    def describe(self, repo: str, rest: list[str]) -> None:
        files = self.hub.repositories[repo]
        if rest[:1] == ["tree"]:
            folder = "/".join(rest[2:])
            names = [name for name in sorted(files) if not folder or name.startswith(folder + "/")]
            if folder and not names:
                self.answer({"error": "Entry not found"}, 404, X_Error_Code="EntryNotFound")
                return
            tree = [{"type": "file", "path": n, "size": len(files[n]), "oid": _sha({n: files[n]})} for n in names]
            self.answer(tree)
        else:
            siblings = [{"rfilename": name} for name in sorted(files)]
            self.answer({"id": repo, "modelId": repo, "sha": _sha(files), "siblings": siblings, "tags": []})

    def resolve(self, repo: str, name: str) -> None:
        files = self.hub.repositories[repo]
        if name not in files:
            self.answer({"error": "Entry not found"}, 404, X_Error_Code="EntryNotFound", X_Repo_Commit=_sha(files))
        else:
            etag = f'"{hashlib.sha256(files[name]).hexdigest()}"'
            self.answer(files[name], ETag=etag, X_Repo_Commit=_sha(files), Content_Type="application/octet-stream")
