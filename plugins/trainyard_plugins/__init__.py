"""The plugins that come with trainyard. They use its public names only, and come in by the same door as anyone's."""
