// A SQLite file of somebody else's, read-only: whole tables, column by column, and nothing that lies in the file runs.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace moe::tools {

class SqliteRows;

class SqliteFile {
public:
    // Throws Error (bad_input) "PATH: reason".
    explicit SqliteFile(const std::string& path);
    ~SqliteFile();
    SqliteFile(const SqliteFile&) = delete;
    SqliteFile& operator=(const SqliteFile&) = delete;

    bool has_table(const std::string& name) const; // whether it is a real table: views are not read
    // All rows of a table. A column whose name begins with '?' is null where the table lacks it; another one that is
    // missing is refused by name.
    SqliteRows rows(const std::string& table, const std::vector<std::string>& columns) const;

private:
    struct Handle;
    std::unique_ptr<Handle> handle_;
};

class SqliteRows {
public:
    ~SqliteRows();
    SqliteRows(SqliteRows&&) noexcept;
    SqliteRows& operator=(SqliteRows&&) = delete;

    bool next(); // throws Error (bad_input) where the file is damaged
    bool is_null(int column) const;
    std::int64_t integer(int column) const; // 0 for null; throws Error (bad_input) for a text that is no number
    std::string text(int column) const;

private:
    friend class SqliteFile;
    struct Statement;
    explicit SqliteRows(std::unique_ptr<Statement> statement);
    std::unique_ptr<Statement> statement_;
};

} // namespace moe::tools
