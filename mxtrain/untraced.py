"""Code that Dynamo, the front end of ``torch.compile``, does not follow line by line."""

import torch

untraced = torch.compiler.allow_in_graph
"""
Decorator of a function or of an autograd function. Arguments are tensors, numbers, strings, None, and lists, named
tuples and frozen dataclasses of them; results are tensors. Dynamo puts a call into its graph as one node. If it
followed the code, the checks of a kernel's arguments would take up to 20 ms a call, and an autograd function up to 150
ms. AOTAutograd sees the operations inside. PyTorch 2.11 also loses the gradient of some aliases in a function that
Dynamo follows, so all autograd functions are untraced (``tests/nn/test_compiled_gradients.py``).

Dynamo makes a frozen dataclass again from all its fields, in their order. An object with numbers is passed as its key
(``mxtrain.recipes.keyed``). A ValueError of a check becomes PyTorch's error for a failed compilation, with the same
text. ``torch.compiler.is_compiling()`` inside depends on PyTorch's version, so it is passed as an argument
"""
