"""A release: everything one version of fast answers is made of, immutable, in one directory.

    releases/
        v42/                manifest.json catalog.mdb decision.json threshold.json
        active.json         which one serves, and which did before
        .verified/v42.json  which files were hashed here, so that a replica need not hash them again

The manifest names every file with its size and SHA-256, and the pointer names the manifest's. Nothing is
mapped before it has been checked: a truncated LMDB file ends its reader with SIGBUS.
"""

from __future__ import annotations

import hashlib
import math
import re
from contextlib import suppress
from pathlib import Path
from typing import Final, Self

import msgspec

from store.catalog import Catalog, CatalogError
from store.decision import DecisionError, Scorer, Threshold, read_model, read_threshold
from store.durable import replace_file
from store.normalise import NORMALISER

SCHEMA: Final = 1
MANIFEST, CATALOG, MODEL, THRESHOLD = "manifest.json", "catalog.mdb", "decision.json", "threshold.json"
PARTS: Final = (CATALOG, MODEL, THRESHOLD)
POINTER: Final = "active.json"
STAMPS: Final = ".verified"
HASHED_AT_SIGHT: Final = 64 << 20
"""Bytes that are hashed when somebody only looks at a release: a tenth of a second."""
_valid_version = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}").fullmatch


class ReleaseError(Exception):
    """A release that cannot be served, published or found; the text says why and what to do."""


class Unhashed(ReleaseError):
    """A release too large to hash at sight, whose files were not hashed here since they changed."""


class FileFacts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A file as the manifest has it."""

    size: int
    sha256: str


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a release says of itself."""

    schema: int
    version: str
    created: str
    """RFC 3339, UTC."""
    normaliser_version: str
    normaliser: str
    """Digest of the normal form of the catalog's keys."""
    entries: int
    keys: int
    model: str
    """Version of the decision model."""
    threshold: str
    """Version of the threshold."""
    files: dict[str, FileFacts]
    parents: tuple[str, ...] = ()
    """The releases this one was made from."""
    source: str = ""
    """SHA-256 of the rows the catalog was built from."""


class Named(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A release and the SHA-256 of its manifest."""

    version: str
    manifest: str


class Pointer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which release serves. `before` are the ones that did, the latest last."""

    active: Named
    sequence: int
    """Raised by each change, so that going back is a change too."""
    before: tuple[Named, ...] = ()


def check_version(version: str) -> str:
    """Return the version if it can name a directory; raise `ReleaseError` otherwise."""
    if _valid_version(version) is None:
        raise ReleaseError(f"release version {version!r}: letters, digits, '.', '_' and '-', at most 64")
    return version


def read_pointer(root: Path) -> Pointer | None:
    """Return the pointer, or None when nothing was ever activated. Raises `ReleaseError`."""
    try:
        return msgspec.json.decode((root / POINTER).read_bytes(), type=Pointer)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ReleaseError(f"{root / POINTER} cannot be read: {error}; activate a release again") from error


def read_manifest(directory: Path) -> tuple[Manifest, str]:
    """Return a release's manifest and the manifest's own SHA-256.

    Raises `ReleaseError` for one that is not there, is of another schema or normal form, or does not list
    exactly the parts of a release.
    """
    try:
        raw = (directory / MANIFEST).read_bytes()
        manifest = msgspec.json.decode(raw, type=Manifest)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ReleaseError(f"{directory} is no release: {error}") from error
    if manifest.schema != SCHEMA:
        raise ReleaseError(f"{directory} has schema {manifest.schema}: this program reads {SCHEMA}")
    if manifest.normaliser != NORMALISER.digest:
        raise ReleaseError(
            f"{directory} was built with normal form {manifest.normaliser_version} "
            f"({manifest.normaliser[:12]}), this program has {NORMALISER.version} "
            f"({NORMALISER.digest[:12]}): build it again"
        )
    if sorted(manifest.files) != sorted(PARTS):
        raise ReleaseError(
            f"{directory} lists {', '.join(sorted(manifest.files))}: a release has {', '.join(PARTS)}"
        )
    return manifest, hashlib.sha256(raw).hexdigest()


def sha256_of(path: Path) -> str:
    """Hash a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def verify(directory: Path) -> Manifest:
    """Check sizes and hashes, then that the parts can be served. Raises `ReleaseError`. Reads every byte."""
    manifest, _ = read_manifest(directory)
    _hash(directory, manifest)
    OpenRelease(directory, manifest).close()
    return manifest


def _hash(directory: Path, manifest: Manifest) -> None:
    check_sizes(directory, manifest)
    for name, facts in manifest.files.items():
        found = sha256_of(directory / name)
        if found != facts.sha256:
            raise ReleaseError(
                f"{directory / name} has SHA-256 {found[:12]}, its manifest {facts.sha256[:12]}: corrupt"
            )


def check_sizes(directory: Path, manifest: Manifest) -> None:
    """Raise `ReleaseError` unless every file is there and as long as the manifest has it."""
    for name, facts in manifest.files.items():
        try:
            size = (directory / name).stat().st_size
        except OSError as error:
            raise ReleaseError(f"{directory / name} is missing: {error}") from error
        if size != facts.size:
            raise ReleaseError(
                f"{directory / name} has {size:,} bytes, its manifest {facts.size:,}: truncated or changed"
            )


class Stamp(msgspec.Struct, frozen=True):
    """A file that had this hash, told from any other by what a change of its bytes cannot leave as it was."""

    device: int
    inode: int
    size: int
    modified_ns: int
    changed_ns: int
    sha256: str

    @classmethod
    def of(cls, path: Path, sha256: str) -> Self:
        """Take a file's stamp."""
        s = path.stat()
        return cls(s.st_dev, s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns, sha256)


def stamps_of(directory: Path, manifest: Manifest) -> dict[str, Stamp]:
    """Return the stamps that the files of a verified release have now."""
    return {name: Stamp.of(directory / name, facts.sha256) for name, facts in manifest.files.items()}


def check_published(
    root: Path, version: str, *, at_most: float = math.inf, again: bool = False
) -> tuple[Manifest, str]:
    """Return a published release's manifest and its digest, once its files are known to be whole.

    Files hashed on this host before, and not changed since, are not hashed again, unless `again`. Raises
    `ReleaseError`; `Unhashed` instead of hashing more than `at_most` bytes.
    """
    directory = root / check_version(version)
    manifest, digest = read_manifest(directory)
    if manifest.version != version:
        raise ReleaseError(f"{directory} holds release {manifest.version}: it was copied by hand; publish it")
    check_sizes(directory, manifest)
    stamps = stamps_of(directory, manifest)
    if again or stamps != _read_stamps(root, version):
        size = sum(facts.size for facts in manifest.files.values())
        if size > at_most:
            raise Unhashed(
                f"{directory}: its {size:,} bytes were not hashed here yet: antiphon release list --verify"
            )
        _hash(directory, manifest)
        write_stamps(root, version, stamps)
    return manifest, digest


def _read_stamps(root: Path, version: str) -> dict[str, Stamp]:
    try:
        return msgspec.json.decode((root / STAMPS / f"{version}.json").read_bytes(), type=dict[str, Stamp])
    except (OSError, msgspec.DecodeError, UnicodeDecodeError):
        return {}


def write_stamps(root: Path, version: str, stamps: dict[str, Stamp]) -> None:
    """Remember that files were hashed. On a disk that cannot be written they are hashed each time."""
    with suppress(OSError):
        (root / STAMPS).mkdir(exist_ok=True)
        replace_file(root / STAMPS / f"{version}.json", msgspec.json.encode(stamps))


def examine(root: Path, version: str, *, again: bool = False) -> tuple[Manifest, str]:
    """Say whether a published release can be served, as a replica would; return its manifest and digest.

    Raises `ReleaseError`; `Unhashed` for a large one that would have to be hashed first. `again` hashes every
    byte of it.
    """
    try:
        at_most = math.inf if again else HASHED_AT_SIGHT
        manifest, digest = check_published(root, version, at_most=at_most, again=again)
    except OSError as error:
        raise ReleaseError(f"{root / version} cannot be read: {error}") from error
    OpenRelease(root / version, manifest).close()
    return manifest, digest


def examine_named(root: Path, named: Named) -> Manifest:
    """Examine the release a pointer names, which has to be the very one. Raises as `examine` does."""
    manifest, digest = examine(root, named.version)
    _demand(root, named, digest)
    return manifest


def _demand(root: Path, named: Named, digest: str) -> None:
    if digest != named.manifest:
        raise ReleaseError(f"{root / named.version} is not what was activated: its manifest has changed")


class OpenRelease:
    """A release that was mapped, probed, and can answer. For one thread at a time."""

    def __init__(self, directory: Path, manifest: Manifest) -> None:
        """Map the parts and ask the probe. The files must have been checked. Raises `ReleaseError`."""
        self.manifest = manifest
        self.version = manifest.version
        try:
            self.scorer = Scorer(read_model(directory / MODEL))
            self.threshold: Threshold = read_threshold(directory / THRESHOLD)
            self.catalog = Catalog(directory / CATALOG)
        except (DecisionError, CatalogError) as error:
            raise ReleaseError(str(error)) from error
        try:
            self._check(directory)
        except CatalogError as error:
            self.close()
            raise ReleaseError(f"{directory}: {error}") from error
        except ReleaseError:
            self.close()
            raise

    def _check(self, directory: Path) -> None:
        about, manifest = self.catalog.about, self.manifest
        if (about.entries, about.keys) != (manifest.entries, manifest.keys):
            raise ReleaseError(
                f"{directory}: the catalog has {about.keys} keys, the manifest {manifest.keys}"
            )
        if (self.scorer.version, self.threshold.version) != (manifest.model, manifest.threshold):
            raise ReleaseError(
                f"{directory}: model {self.scorer.version} and threshold {self.threshold.version} "
                f"where the manifest has {manifest.model} and {manifest.threshold}"
            )
        if not self.catalog.answers_its_probe():
            raise ReleaseError(f"{directory}: the catalog does not find its own probe {about.probe!r}")

    def close(self) -> None:
        """Unmap the catalog."""
        self.catalog.close()


def open_release(root: Path, named: Named) -> OpenRelease:
    """Check, map and probe the release that a pointer names.

    Raises `ReleaseError`; then nothing was mapped, or it is unmapped again.
    """
    try:
        manifest, digest = check_published(root, named.version)
    except OSError as error:
        raise ReleaseError(f"{root / named.version} cannot be read: {error}") from error
    _demand(root, named, digest)
    return OpenRelease(root / named.version, manifest)
