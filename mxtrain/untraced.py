"""Code that Dynamo, the front end of ``torch.compile``, does not follow line by line."""

import torch

untraced = torch.compiler.allow_in_graph
"""
Decorator of a function of tensors, numbers, strings, None, and lists, named tuples and frozen dataclasses of them,
which returns tensors; or of an autograd function like that. Dynamo puts a call into its graph as one node: its own way
through the checks of a kernel's arguments takes up to 20 ms a call, and through an autograd function up to 150 ms.
AOTAutograd sees the operations inside.

Dynamo makes a frozen dataclass again from all its fields, in their order; one with numbers goes as a key
(``mxtrain.recipes.keyed``). A ValueError of a check becomes PyTorch's error for a failed compilation, with the same
text. Inside, ``torch.compiler.is_compiling()`` is False with PyTorch 2.11
"""
