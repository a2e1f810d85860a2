"""Triton's interpreter without repeated work, and with two of its errors corrected.

`interpreted_quickly`: the same operations on the same numbers in a fifth of the time. As it comes, the interpreter replaces the
functions of `triton.language` again at each call of a device function, although the launch has done that. At each operation it
makes a table of types and new objects for a block's shape, and asks which types the operands have to be converted to; here
operands of one type and shape are taken as they are, those of two shapes NumPy broadcasts, and a number becomes a block once. A
sum of bits, of which a sort makes one for each exchange, it computes number by number. And whether a sum or a product of integers
overflows it finds out with a dozen operations of Triton, whose result it does not look at; here NumPy finds it out, and an
overflow ends the kernel.

`errors_corrected`: two things work as on a GPU in every version of Triton.
- A scalar comparison that is broadcast to a block stays boolean. The interpreter gives a comparison the type of its operands, and a
  broadcast converts to it; since Triton 3.9 a load or store refuses a mask that is not boolean.
- A constant times a tensor is a tensor for tl.exp2 and the like. The interpreter makes a constant of it, which 3.9 refuses there.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache

import numpy as np
import triton.language as tl
from triton._utils import validate_block_shape
from triton.language.semantic import TritonSemantic

_WIDE = {"add": np.add, "sub": np.subtract, "mul": np.multiply}
"""Operators whose results are looked at, of int64."""


_SHAPES: dict[int, tuple[int, ...]] = {}
"""The shapes of tensors and of block types by their identity, which is not given again: the two caches keep them."""


@cache
def _sizes(shape: tuple[int, ...]) -> tuple[tl.tuple, tl.constexpr]:
    """A tensor's `shape` and `numel`. Tensors share them: nothing writes into them."""
    sizes = tl.tuple([tl.constexpr(size) for size in shape])
    _SHAPES[id(sizes)] = shape
    return sizes, tl.constexpr(math.prod(shape))


@cache
def _checked(shape: tuple[int, ...], element: str) -> tuple[str, tl.tuple, int]:
    """A block's `name`, `shape` and `numel`."""
    if not shape:
        raise TypeError("a block has at least one dimension")
    sizes = tl.tuple(shape)
    _SHAPES[id(sizes)] = shape
    return f"<{shape}, {element}>", sizes, validate_block_shape(shape)


@cache
def _joined(left: tuple[int, ...], right: tuple[int, ...]) -> tuple[int, ...] | None:
    """The shape to which both are broadcast; None: there is none."""
    try:
        return np.broadcast_shapes(left, right)
    except ValueError:
        return None


def _block(self: tl.block_type, element_ty: tl.dtype, shape: object) -> None:
    """In place of `tl.block_type.__init__`."""
    self.element_ty = element_ty
    self.name, self.shape, self.numel = _checked(_shape_of(shape), element_ty.name)


def _tensor(self: tl.tensor, handle: object, type: tl.dtype) -> None:
    """In place of `tl.tensor.__init__`."""
    self.handle, self.type, self.dtype = handle, type, type.scalar
    self.shape, self.numel = _sizes(_shape_of(type.shape) if type.is_block() else ())


def _shape_of(shape: object) -> tuple[int, ...]:
    """The integers of a shape, of which most are known."""
    known = _SHAPES.get(id(shape))
    return tuple(_integers(shape)) if known is None else known


def _integers(shape: object) -> list[object]:
    """Of a shape that may have compile-time constants."""
    values = shape.value if isinstance(shape, tl.constexpr) else shape
    values = values.values if isinstance(values, tl.tuple) else values
    return [size.value if isinstance(size, tl.constexpr) else size for size in values]


def _refuse_overflow(self: object, lhs: tl.tensor, rhs: tl.tensor, binary_op: Callable[..., object]) -> None:
    """In place of `TritonSemantic.binary_op_sanitize_overflow_impl`."""
    kind = lhs.type.scalar
    if kind.int_bitwidth < 64:
        found = _WIDE[binary_op.__name__](lhs.handle.data.astype(np.int64), rhs.handle.data.astype(np.int64))
        if found.size and (found.min() < kind.get_int_min_value() or found.max() > kind.get_int_max_value()):
            raise OverflowError(f"{binary_op.__name__} of {kind}: {found.min()} to {found.max()}")


def _patch_member(obj: object, name: str, member: Callable[..., object], builder: object, scope: object) -> None:
    """In place of `interpreter._patch_attr`."""
    semantic, function = TritonSemantic(builder), getattr(member, "__wrapped__", member)  # without the check that it has one

    def call(*args: object, **kwargs: object) -> object:
        kwargs["_semantic"] = semantic
        return function(*args, **kwargs)

    scope.set_attr(obj, name, call)


PLAIN = (tl.int1, tl.int32, tl.int64, tl.float32, tl.float64)
"""Two operands of one of these are computed with as they are, whatever the operator."""
VALUES = frozenset((tl.tensor, int, float, bool, type(None)))
"""Types of what holds no compile-time constant."""


@contextmanager
def interpreted_quickly() -> Iterator[None]:
    """Within it interpreted launches take less time. Not for two threads."""
    from triton.runtime import interpreter
    from triton.runtime.errors import InterpreterError

    overflow, operands = TritonSemantic.binary_op_sanitize_overflow_impl, TritonSemantic.binary_op_type_checking_impl
    reduce, patch_member = interpreter.ReduceOps.apply_impl, interpreter._patch_attr
    unwrap, equal = tl.core._unwrap_if_constexpr, tl.dtype.__eq__
    broadcast, convert = TritonSemantic.broadcast_impl_value, TritonSemantic.cast
    patch, type_of = interpreter._patch_lang, interpreter._get_np_dtype
    call, tensor, block = interpreter.InterpretedFunction.__call__, tl.tensor.__init__, tl.block_type.__init__
    expand = TritonSemantic.expand_dims

    def patch_all(fn: object) -> object:
        """At a launch: also the functions that only device functions call."""
        scope = patch(fn)
        interpreter._patch_builtin(tl.core, interpreter.interpreter_builder, scope)
        interpreter._patch_lang_core(tl.core, scope)
        return scope

    def call_as_patched(self: object, *args: object, **kwargs: object) -> object:
        try:
            return self.rewrite()(*args, **kwargs)
        except Exception as error:
            raise InterpreterError(repr(error)) from error

    plain, offsets, constants = frozenset(map(id, PLAIN)), frozenset(map(id, (tl.int32, tl.int64))), {}

    def broadcast_by_numpy(self: object, lhs: tl.tensor, rhs: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
        """The operands of an elementwise operator, whose types get one shape; their data get it when NumPy computes."""
        if lhs.shape is rhs.shape:
            return lhs, rhs
        shape = _joined(_shape_of(lhs.shape), _shape_of(rhs.shape))
        if shape is None or not (is_computed_with(lhs) and is_computed_with(rhs)):
            return broadcast(self, lhs, rhs)
        return tuple(x if _shape_of(x.shape) == shape else tl.tensor(x.handle, tl.block_type(x.dtype, shape)) for x in (lhs, rhs))

    def is_computed_with(x: tl.tensor) -> bool:
        """Whether an array is of its tensor's type: of a comparison of scalars it is not."""
        return x.handle.data.dtype == numpy_type(x.dtype)

    def expanded(self: object, x: tl.tensor, axis: int) -> tl.tensor:
        if not x.type.is_block() or axis < 0:
            return expand(self, x, axis)
        shape = _shape_of(x.shape)
        shape = (*shape[:axis], 1, *shape[axis:])
        handle = interpreter.TensorHandle(x.handle.data.reshape(shape), x.handle.dtype.scalar)
        return tl.tensor(handle, tl.block_type(x.dtype, shape))

    def checked_operands(self: object, lhs: object, rhs: object, *rest: bool, **named: bool) -> tuple[tl.tensor, tl.tensor]:
        """Types and shapes are looked at where they differ, and for each number and type of the other operand once."""
        blocks = (type(lhs) is tl.tensor, type(rhs) is tl.tensor)
        if blocks == (True, True):
            if lhs.dtype is rhs.dtype and id(lhs.dtype) in plain:
                return broadcast_by_numpy(self, lhs, rhs)
            if rest == (True, True) and lhs.dtype.is_ptr() and id(rhs.dtype) in offsets:
                return broadcast_by_numpy(self, lhs, rhs)
            return operands(self, lhs, rhs, *rest, **named)
        block, number = (lhs, rhs) if blocks[0] else (rhs, lhs)
        # zero has two signs, which are equal
        if True not in blocks or type(number) not in (int, float) or (number == 0 and type(number) is float):
            return operands(self, lhs, rhs, *rest, **named)
        key = (blocks, type(number), number, block.type.name, rest, *named.items())
        if key not in constants:
            found = operands(self, lhs, rhs, *rest, **named)
            if found[blocks.index(True)] is not block or found[blocks.index(False)].dtype.is_int_unsigned():
                return found
            constants[key] = found[blocks.index(False)]
        return (block, constants[key]) if blocks[0] else (constants[key], block)

    def reduce_bits(self: object, values: tuple[tl.tensor, ...]) -> object:
        if self.combine_fn is not tl.standard._xor_combine or self.axis is None:
            return reduce(self, values)
        found = np.bitwise_xor.reduce(values[0].handle.data, axis=self.axis, keepdims=self.keep_dims)
        return self.to_tensor(found, values[0].dtype)

    def broadcast_others(self: object, *tensors: tl.tensor) -> tuple[tl.tensor, ...]:
        """Most have one shape, which is one object (`_sizes`)."""
        return tensors if len({id(x.shape) for x in tensors}) == 1 else broadcast(self, *tensors)

    def cast_others(self: object, x: tl.tensor, dtype: tl.dtype, *rest: object, **named: object) -> tl.tensor:
        return x if x.dtype is dtype else convert(self, x, dtype, *rest, **named)

    def value_of(x: object) -> object:
        return x if type(x) in VALUES else x.value if type(x) is tl.constexpr else unwrap(x)

    def is_type(self: tl.dtype, other: object) -> bool:
        return self.name == other.name if isinstance(other, tl.dtype) else equal(self, other)

    known = cache(type_of)

    def numpy_type(dtype: tl.dtype) -> object:
        element = dtype.scalar
        return type_of(element) if element.is_ptr() else known(element)  # types of pointers and of blocks have no hash

    interpreter._patch_lang, interpreter._get_np_dtype = patch_all, numpy_type
    TritonSemantic.expand_dims = expanded
    interpreter.InterpretedFunction.__call__, tl.tensor.__init__ = call_as_patched, _tensor
    tl.block_type.__init__, TritonSemantic.binary_op_sanitize_overflow_impl = _block, _refuse_overflow
    TritonSemantic.broadcast_impl_value, TritonSemantic.cast = broadcast_others, cast_others
    TritonSemantic.binary_op_type_checking_impl = checked_operands
    interpreter.ReduceOps.apply_impl, interpreter._patch_attr = reduce_bits, _patch_member
    tl.core._unwrap_if_constexpr, tl.dtype.__eq__ = value_of, is_type
    try:
        yield
    finally:
        interpreter._patch_lang, interpreter._get_np_dtype = patch, type_of
        TritonSemantic.expand_dims = expand
        interpreter.InterpretedFunction.__call__, tl.tensor.__init__ = call, tensor
        tl.block_type.__init__, TritonSemantic.binary_op_sanitize_overflow_impl = block, overflow
        TritonSemantic.broadcast_impl_value, TritonSemantic.cast = broadcast, convert
        TritonSemantic.binary_op_type_checking_impl = operands
        interpreter.ReduceOps.apply_impl, interpreter._patch_attr = reduce, patch_member
        tl.core._unwrap_if_constexpr, tl.dtype.__eq__ = unwrap, equal


@contextmanager
def errors_corrected() -> Iterator[None]:
    """Within it comparisons stay boolean and products with constants are tensors. Not for two threads."""
    from triton.runtime import interpreter

    builder = interpreter.InterpreterBuilder
    splat, to_tensor = builder.create_splat, TritonSemantic.to_tensor

    def splat_boolean(self: object, block: tl.block_type, scalar: interpreter.TensorHandle) -> interpreter.TensorHandle:
        if scalar.data.dtype == np.bool_:
            scalar = interpreter.TensorHandle(scalar.data, tl.int1)
        return splat(self, block, scalar)

    def tensor_of(self: object, x: object, *rest: object, **named: object) -> tl.tensor:
        if type(x) is tl.tensor:
            return x
        return to_tensor(self, x.value if isinstance(x, tl.constexpr) else x, *rest, **named)

    builder.create_splat, TritonSemantic.to_tensor = splat_boolean, tensor_of
    try:
        yield
    finally:
        builder.create_splat, TritonSemantic.to_tensor = splat, to_tensor
