"""The API reference shows one signature of a function with overloads: the first one, which has every option."""

from typing import Any

import griffe


class FullSignatures(griffe.Extension):
    """Gives each function with overloads the parameters of the first, and those of its own that this lacks."""

    def on_package(self, *, pkg: griffe.Module, loader: griffe.GriffeLoader, **kwargs: Any) -> None:
        """Called when a package has been read."""
        for module in _modules(pkg):
            for function in module.functions.values():
                if not function.is_alias and function.overloads:
                    first = function.overloads[0]
                    own = [parameter for parameter in function.parameters if parameter.name not in first.parameters]
                    kept = [parameter for parameter in first.parameters if parameter.name != "defaults"]
                    function.parameters = griffe.Parameters(*kept, *own)
                    function.overloads = None


def _modules(module: griffe.Module) -> list[griffe.Module]:
    below = [found for child in module.modules.values() if not child.is_alias for found in _modules(child)]
    return [module, *below]
