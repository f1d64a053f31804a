"""The least time a problem can take on a device: its bytes over the copy rate, its FLOPs over the
matrix rate of its precision class, whichever is longer.

Bytes: every input, parameter and output moves once. FLOPs: matrix products and convolutions, as
`torch.utils.flop_counter` counts them; pointwise arithmetic is left out, so the floor is a true
floor. Rates are measured on the device (`workers/probe.py`), never taken from a datasheet.
Split-precision tricks (fp32 by three TF32 products) can go below the fp32 floor.
"""

from __future__ import annotations

from collections.abc import Mapping

from schemas.records import Precision


def roofline_ms(
    min_bytes: int, flops: int, precision: Precision, rates: Mapping[str, float]
) -> float:
    """Milliseconds at the roofline. `rates`: bytes/s under "copy", FLOP/s under each class."""
    return 1e3 * max(min_bytes / rates["copy"], flops / rates[str(precision)])
