"""The control loop: records to the trainer, candidates through the gate, promoted drafters into the fleet."""
