"""A faster start of functions in Triton's interpreter.

Before a kernel runs, the interpreter replaces the functions of ``triton.language``. It does so again for every call of
a function within the kernel, although nothing is left to replace: a third of the time of our kernels.
"""

from triton.runtime import interpreter


def patch_the_language_once_per_launch() -> None:
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
