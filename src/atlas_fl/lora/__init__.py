"""LoRA: many clients' adapters on one frozen backbone, and the way to and from PEFT."""
