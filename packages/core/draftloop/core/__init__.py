"""What every room shares: typed config, capture records, manifests, events and errors."""
