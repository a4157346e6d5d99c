"""A trace in, numbers out. Pure: Arrow tables and arrays in, values out; nothing here opens a file or reads a clock."""
