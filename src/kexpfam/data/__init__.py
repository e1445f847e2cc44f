"""What goes in: tables, checked samples, and the map between the data's units and the model's."""
