"""Releases in object storage, for many hosts: anything `obstore` opens (S3, GCS, Azure, a directory, memory).

The manifest goes last and only if it is not there yet, so a version is whole or does not exist, and two
publishers of one version cannot both win. A host fetches a release, checks it and publishes it to itself.
"""

from __future__ import annotations

import re
import tempfile
from pathlib import Path
from typing import Any

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError
from obstore.store import from_url

from store.release import MANIFEST, FileFacts, Manifest, ReleaseError, check_version, read_manifest, verify
from store.release_publish import publish

CHUNK = 8 << 20
"""Bytes held in memory of a part that is fetched."""
_system_said = re.compile(r'message: "([^"]+)"').findall


def open_store(url: str) -> Any:
    """Open `s3://bucket/prefix`, `gs://`, `az://`, `file:///directory`; each finds its credentials as usual.

    Raises `ReleaseError`.
    """
    try:
        return from_url(url)
    except (BaseError, OSError, ValueError) as error:
        raise ReleaseError(f"{url} cannot be opened: {_in_one_line(error)}") from error


def _in_one_line(error: Exception) -> str:
    """Leave out obstore's dump of its own structures, except for what the system said."""
    text = str(error)
    line = text.partition("\n")[0].strip()
    said = _system_said(text)
    return f"{line}: {said[-1]}" if said and said[-1] not in line else line


def push(store: Any, built: Path) -> Manifest:
    """Put a built release under its version. Pushing the same again does nothing.

    Raises `ReleaseError` for a version that is taken by another release, or when the store refuses.
    """
    manifest = verify(built)
    content, place = (built / MANIFEST).read_bytes(), f"{manifest.version}/{MANIFEST}"
    try:
        if _is_there(store, place, content):
            return manifest
        for name, facts in manifest.files.items():
            obstore.put(store, _part(manifest.version, name, facts), built / name)
        obstore.put(store, place, content, mode="create")
    except AlreadyExistsError:
        _is_there(store, place, content)
    except (BaseError, OSError) as error:
        raise ReleaseError(
            f"release {manifest.version} was not pushed to {store}: {_in_one_line(error)}"
        ) from error
    return manifest


def pull(store: Any, version: str, root: Path) -> Manifest:
    """Fetch a release and publish it on this host. Raises `ReleaseError`; then nothing is published here."""
    check_version(version)
    with tempfile.TemporaryDirectory(prefix="antiphon-release-") as directory:
        here = Path(directory)
        try:
            (here / MANIFEST).write_bytes(obstore.get(store, f"{version}/{MANIFEST}").bytes())
            for name, facts in read_manifest(here)[0].files.items():
                with (here / name).open("wb") as file:
                    for chunk in obstore.get(store, _part(version, name, facts)).stream(CHUNK):
                        file.write(chunk)
        except FileNotFoundError as error:
            raise ReleaseError(
                f"release {version} is not in the store, or not whole: {_in_one_line(error)}"
            ) from error
        except (BaseError, OSError) as error:
            raise ReleaseError(
                f"release {version} was not fetched from {store}: {_in_one_line(error)}"
            ) from error
        return publish(root, here)


def _part(version: str, name: str, facts: FileFacts) -> str:
    """A part's own name has its hash in it: two publishers of one version cannot mix theirs."""
    return f"{version}/{facts.sha256}-{name}"


def _is_there(store: Any, place: str, content: bytes) -> bool:
    """Say whether an object is there, with this content. Raises `ReleaseError` for other content."""
    try:
        found = bytes(obstore.get(store, place).bytes())
    except FileNotFoundError:
        return False
    if found != content:
        raise ReleaseError(f"{place} is there already, with other content: take a new version")
    return True
