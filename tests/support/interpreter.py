"""Triton's interpreter without the work that changes no result, which is more than half of its time."""

from dataclasses import replace


def interpret_faster() -> None:
    """Patch the interpreter, before any kernel is imported."""
    from triton.language import core
    from triton.runtime import interpreter

    _patch_the_language_once_per_launch(interpreter)
    builder = interpreter.interpreter_builder
    # Sums and products of integers are computed again in 64 bits, for an assertion that only debugging makes.
    builder.options = replace(builder.options, sanitize_overflow=builder.options.debug)
    _know_types(interpreter, core, builder)
    _broadcast_in_few_steps(interpreter.interpreter_semantic, core, builder)


def _patch_the_language_once_per_launch(interpreter) -> None:
    """Every call of a function within a kernel patches ``triton.language``, although nothing is left to replace."""
    patch, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
    patched = set()

    def patch_once(function):
        # The functions of a module see the same language.
        if id(function.__globals__) not in patched:
            patched.add(id(function.__globals__))
            return patch(function)

    def launch_anew(self, *args, **kwargs):
        patched.clear()
        return launch(self, *args, **kwargs)

    interpreter._patch_lang, interpreter.GridExecutor.__call__ = patch_once, launch_anew


def _know_types(interpreter, core, builder) -> None:
    """What follows from a type is found once, not for every value."""
    np_dtype_of, np_dtypes = interpreter._get_np_dtype, {}

    def np_dtype(dtype):
        name = dtype.scalar.name
        if name not in np_dtypes:
            np_dtypes[name] = np_dtype_of(dtype)
        return np_dtypes[name]

    init, known = core.tensor.__init__, {}

    def init_as_known(self, handle, type):
        if type.name not in known:
            init(self, handle, type)
            known[type.name] = dict(vars(self))
        vars(self).update(known[type.name], handle=handle, type=type)

    to_ir, unwrap = core.block_type.to_ir, core._unwrap_if_constexpr
    interpreter._get_np_dtype, core.tensor.__init__ = np_dtype, init_as_known
    # The interpreter's types are those of the language.
    core.block_type.to_ir = lambda self, of: self if of is builder else to_ir(self, of)
    # Most values are numbers and tensors, which hold no constant.
    core._unwrap_if_constexpr = lambda value: value if type(value) in (int, core.tensor) else unwrap(value)


def _broadcast_in_few_steps(semantic, core, builder) -> None:
    """Most pairs are blocks of one shape, or a block and a scalar of the same dtype: neither needs another type."""
    broadcast = semantic.broadcast_impl_value

    def splat(scalar, block):
        same = block.type.scalar == scalar.type
        type = block.type if same else block.type.with_element_ty(scalar.type)
        return core.tensor(builder.create_splat(type, scalar.handle), type)

    def broadcast_blocks(lhs, rhs):
        if lhs.type.is_block() and rhs.type.is_block():
            return (lhs, rhs) if lhs.type.shape == rhs.type.shape else broadcast(lhs, rhs)
        if lhs.type.is_block():
            return lhs, splat(rhs, lhs)
        return (splat(lhs, rhs) if rhs.type.is_block() else lhs), rhs

    semantic.broadcast_impl_value = broadcast_blocks
