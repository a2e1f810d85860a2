"""Numbers of bytes as a plan shows them."""


def size(nbytes: int) -> str:
    """In the largest unit of which there is one."""
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if nbytes >= unit:
            return f"{nbytes / unit:,.2f} {name}"
    return f"{nbytes} bytes"


def row(text: str, nbytes: int) -> str:
    """A line of a table."""
    return f"  {text:<44}{size(nbytes):>14}"
