"""Numbers as people are shown them: three digits and a unit."""

from __future__ import annotations

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def size(num_bytes: float) -> str:
    """Bytes, with three digits and a unit."""
    for unit in _UNITS:
        if num_bytes < 999.5 or unit == _UNITS[-1]:
            break
        num_bytes /= 1024
    return f"{num_bytes:,.0f} B" if unit == "B" else f"{digits(num_bytes)} {unit}"


def count(tokens: int) -> str:
    """A number of tokens; large ones with three digits and a factor."""
    for unit, factor in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if tokens >= max(factor, 10_000):
            return f"{digits(tokens / factor)} {unit}"
    return f"{tokens:,}"


def seconds(s: float) -> str:
    """A time, with three digits and a unit."""
    return f"{digits(s * 1e3)} ms" if s < 0.9995 else f"{digits(s)} s"


def flop(flops: int) -> str:
    """Operations, in a unit that a model of its size is spoken of."""
    units = (("PFLOP", 1e15), ("TFLOP", 1e12), ("GFLOP", 1e9))
    unit, factor = next((pair for pair in units if flops >= 0.0995 * pair[1]), units[-1])
    number = flops / factor
    return f"{number:,.0f} {unit}" if number >= 999 else f"{number:#.3g}".rstrip(".") + f" {unit}"


def numerous(number: int) -> str:
    return f"{digits(number / 1e9)} billion" if number >= 0.0995e9 else f"{digits(number / 1e6)} million"


def digits(value: float) -> str:
    """Three digits, or all before the point."""
    return f"{value:,.{0 if value >= 99.95 else 1 if value >= 9.995 else 2}f}"


def tokens_of(tokens: int, beyond_model: bool) -> str:
    """A length, with a mark if it is longer than the model's positions."""
    return f"{tokens:,}{'*' if beyond_model else ''}"
