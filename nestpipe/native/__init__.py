"""The one C++ extension: compiled on this machine at first use, cached, and optional.

Every kernel has a readable version in torch with the same contract, which runs where there is no compiler.
"""

from nestpipe.native.build import BuildError, Native, library, load, status

__all__ = ["BuildError", "Native", "library", "load", "status"]
