"""How kernels are launched, how code of ours appears to PyTorch, and PyTorch's private names.

Here, without PyTorch: frozen dataclasses that compiled code takes as a text.
"""

from dataclasses import fields


class Keyed:
    """Base class of frozen dataclasses that compiled code takes as a text: their key, by which ``from_key`` finds them.

    They are compared by their keys. Dynamo makes every number that has changed since the last compilation an input of
    the graph. A text stays a constant, and another text is compiled anew. So an ``untraced`` function takes the key in
    the place of the numbers, and traced code compares keys. PyTorch 2.13 and 2.15 stop with an error if numbers that
    have changed are compared.

    Subclasses are declared with ``eq=False``, and their ``__post_init__`` calls ``_register``.
    """

    key: str
    """The class and the values of all fields with ``compare=True``. Objects with the same key compute the same"""

    def __eq__(self, other) -> bool:
        return isinstance(other, Keyed) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)

    def _register(self) -> None:
        values = [getattr(self, field.name) for field in fields(self) if field.compare]
        key = repr((type(self).__qualname__, *(value.key if isinstance(value, Keyed) else value for value in values)))
        object.__setattr__(self, "key", key)
        _REGISTERED[key] = self

    def __setstate__(self, state: dict) -> None:
        # A copy, maybe from another process, does not run __init__.
        self.__dict__.update(state)
        self._register()


_REGISTERED: dict[str, Keyed] = {}


def from_key(key: str):
    return _REGISTERED[key]
