"""The library that emitted packages call. Imports torch, safetensors and the standard library only."""

from .attention import attention_site
from .binding import begin_region, bind_context_parallel, refuse_enable_parallelism, use_processors

__all__ = ["attention_site", "begin_region", "bind_context_parallel", "refuse_enable_parallelism", "use_processors"]
