"""The two passes in C for small networks on the CPU, where starting torch's operations costs more than the arithmetic.

Compiled with the system's compiler when first needed (`build`); without one, or with ``VARPROP_NATIVE=0``, the passes
in torch do the same.
"""

from .backend import Kept, NativeBackend, make_native
from .build import Compiled, compiled, describe_native

__all__ = ["Compiled", "Kept", "NativeBackend", "compiled", "describe_native", "make_native"]
