"""An authority of our own, and certificates by it for loopback, made by the `openssl` command."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

OPENSSL = shutil.which("openssl")


def _run(*arguments: str) -> None:
    subprocess.run([str(OPENSSL), *arguments], check=True, capture_output=True)


def authority(directory: Path) -> Path:
    """Make it; its certificate. Its key lies beside."""
    directory.mkdir()
    key, made = directory / "ca.key", directory / "ca.crt"
    new = ["req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=test authority"]
    _run(*new, "-addext", "keyUsage=critical,keyCertSign,cRLSign", "-keyout", str(key), "-out", str(made))
    return made


def certificate(by: Path, name: str, *, host: str = "IP:127.0.0.1") -> tuple[Path, Path]:
    """Certificate and key for a host, signed by an authority."""
    made, key, asked = (by.parent / f"{name}.{kind}" for kind in ("crt", "key", "csr"))
    _run("req", "-newkey", "rsa:2048", "-nodes", "-subj", f"/CN={name}", "-keyout", str(key), "-out", str(asked))
    extra = by.parent / f"{name}.ext"
    extra.write_text(f"subjectAltName={host}\nauthorityKeyIdentifier=keyid\n")
    signed = ["x509", "-req", "-days", "2", "-in", str(asked), "-CA", str(by), "-CAkey", str(by.with_suffix(".key"))]
    _run(*signed, "-CAcreateserial", "-extfile", str(extra), "-out", str(made))
    return made, key
