"""Files and folders for their owner alone: what is made, moved or found in a folder of people's text."""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

_FILE, _FOLDER = 0o600, 0o700


def make_folder(path: Path) -> Path:
    """Make a folder, and missing ones above it; root gives them to the owner of the folder above them."""
    if not path.is_dir():
        make_folder(path.parent)
        with suppress(FileExistsError):
            path.mkdir(_FOLDER)
            if os.geteuid() == 0:
                owner = path.parent.stat()
                os.chown(path, owner.st_uid, owner.st_gid, follow_symlinks=False)
    return path


def open_file(path: Path) -> BinaryIO:
    """Open a file, which is made if it is missing, to read and write it."""
    file = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, _FILE), "r+b")
    _claim(file.fileno(), _FILE, path.parent.stat())
    return file


def secure(top: Path) -> None:
    """Give a file, or a folder and all in it, to the owner of the folder above it, for that user alone.

    Links, and files with a second name elsewhere, stay as they are. Raises OSError if something else cannot
    be changed.
    """
    owner = top.parent.stat()
    if top.is_file() and not top.is_symlink():
        open_file(top).close()
        return
    for _, _, names, folder in os.fwalk(top, onerror=_fail):
        _claim(folder, _FOLDER, owner)
        for name in names:
            with suppress(FileNotFoundError):  # deleted meanwhile
                if stat.S_ISREG(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode):
                    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
                    with os.fdopen(os.open(name, flags, dir_fd=folder), "rb") as file:
                        _claim(file.fileno(), _FILE, owner)


def _claim(handle: int, mode: int, owner: os.stat_result) -> None:
    found = os.fstat(handle)
    if stat.S_ISREG(found.st_mode) and found.st_nlink > 1:
        return
    if os.geteuid() == 0 and found.st_uid != owner.st_uid:
        os.fchown(handle, owner.st_uid, owner.st_gid)
    if stat.S_IMODE(found.st_mode) != mode:
        os.fchmod(handle, mode)


def _fail(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError):
        raise error
