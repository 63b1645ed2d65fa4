"""Kinds of files other than regular ones, by name: functions of the path that make one."""

import os
import socket


def _bind(path):
    here = os.getcwd()
    os.chdir(path.parent)  # the name of a socket is short
    try:
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind(path.name)
    finally:
        os.chdir(here)


SPECIAL = {
    "a FIFO": lambda path: os.mkfifo(path),  # not there on Windows
    "a directory": os.mkdir,
    "a socket": _bind,
    "a device": lambda path: path.symlink_to("/dev/null"),
    "a symbolic link": lambda path: path.symlink_to(path.name),
}
