"""The serving fleet: SGLang workers as Ray actors. Routing, health and roll-out over many come with their issue."""
