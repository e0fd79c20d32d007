"""An HTML page of tables with a viewer for slices. It is one file and needs no network."""
