"""From the tap in SGLang's scheduler to the trainer's batches: wire format, ring, assembler, replay buffer."""
