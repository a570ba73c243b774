"""Bytes that a process has written."""


def bytes_written() -> int:
    """Bytes that this process has written, to sockets too."""
    with open("/proc/self/io") as counters:
        return next(int(line.split()[1]) for line in counters if line.startswith("wchar"))
