"""Which value a hook or policy is, so that hooks made anew cost nothing and a change of them exactly one compilation.

      rule --described--> text of what is frozen (arguments of the library, graphs), and the functions in it, if any
      functions           `Probe`: Dynamo traces `unpack(pack(example))`; its guards tell on a call which value they are
      policies            asked again about the saved tensors that they were asked about
      Record              what a compiled graph was made of: `record.matches(rule)` tells whether that is so still

Nobody's code is imported, walked or run to guess what it may mean: Dynamo traces it, on fake tensors.
"""

from .frozen import code_of, described
from .records import Record, Recording, note_answer, note_trace, recording
from .tensors import READ_EACH_TIME, is_plain, tensor_digest

__all__ = [
    "READ_EACH_TIME",
    "Record",
    "Recording",
    "code_of",
    "described",
    "is_plain",
    "note_answer",
    "note_trace",
    "recording",
    "tensor_digest",
]
