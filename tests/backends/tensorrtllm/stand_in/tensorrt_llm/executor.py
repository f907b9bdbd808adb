"""Names that the library has in `tensorrt_llm.executor`."""

from dataclasses import dataclass


class RequestError(RuntimeError):
    pass


@dataclass(slots=True)
class LoRARequest:
    lora_name: str
    lora_int_id: int
    lora_path: str = ""
    lora_ckpt_source: str = "hf"
