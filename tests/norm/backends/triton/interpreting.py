"""Triton 3.6's interpreter on numpy 2.4, which no longer turns an array of one element into an index."""


def repair():
    """Let a scalar of the interpreter be a bound of `range`."""
    from triton.runtime import interpreter

    original = interpreter._patch_lang_tensor

    def patched(tensor, scope):
        original(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patched
